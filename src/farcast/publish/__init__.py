"""The trainer's side: versions into a store."""

from farcast.publish.job import PublishJob
from farcast.publish.publisher import Publisher
from farcast.publish.reports import PublishReport, PublishTotals

__all__ = ["PublishJob", "PublishReport", "PublishTotals", "Publisher"]
