"""A still picture of a run, for `farcast status`."""

import time

from rich.console import Group, RenderableType
from rich.text import Text

from farcast.dashboard.figures import human_seconds
from farcast.dashboard.live import policy_table, replica_table
from farcast.fleet.observe import FleetSnapshot


def status_view(snapshot: FleetSnapshot) -> RenderableType:
    """Trainer, newest step and replicas, one below the other."""
    parts: list[RenderableType] = [_trainer_line(snapshot)]
    if snapshot.steps:
        parts += [Text(), policy_table(snapshot.steps)]
    if snapshot.replicas:
        parts += [Text(), replica_table(snapshot, killed=set())]
    else:
        parts.append(Text("No replica has joined yet.", style="yellow"))
    return Group(*parts)


def _trainer_line(snapshot: FleetSnapshot) -> Text:
    trainer = snapshot.trainer
    if trainer is None:
        return Text("No trainer has started on this store yet.", style="yellow")
    ago = human_seconds(max(0.0, time.time() - trainer.updated))
    text = Text(f"run {trainer.run_id}", style="bold")
    text.append(
        f"  trainer {trainer.state}, step {trainer.step}, version {trainer.version}",
        style="green" if trainer.state in ("training", "done") else "yellow",
    )
    text.append(f"  (said {ago} ago)", style="dim")
    return text
