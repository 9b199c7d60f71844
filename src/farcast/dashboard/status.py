"""A still picture of a run, for `farcast status`."""

from collections import Counter

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
        parts += [Text(), _fleet_line(snapshot), replica_table(snapshot, killed=set())]
    else:
        parts.append(Text("No replica has joined yet.", style="yellow"))
    return Group(*parts)


def _trainer_line(snapshot: FleetSnapshot) -> Text:
    trainer = snapshot.trainer
    if trainer is None:
        return Text("No trainer has started on this store yet.", style="yellow")
    text = Text(f"run {trainer.run_id}", style="bold")
    text.append(
        f"  trainer {trainer.state}, step {trainer.step}, version {trainer.version}",
        style="green" if trainer.state in ("training", "done") else "yellow",
    )
    if snapshot.trainer_written is not None:
        ago = human_seconds(max(0.0, round(snapshot.seen - snapshot.trainer_written)))
        lost = snapshot.trainer_life in ("silent", "dead")
        text.append(f"  (said {ago} ago)", style="red" if lost else "dim")
    return text


def _fleet_line(snapshot: FleetSnapshot) -> Text:
    """`replicas  2 alive, 1 dead, 410 tokens/s`"""
    lives = Counter(snapshot.life(name) for name in snapshot.replicas)
    text = Text("replicas  ", style="dim")
    text.append(", ".join(f"{count} {life}" for life, count in sorted(lives.items())))
    text.append(f", {snapshot.tokens_per_second:.0f} tokens/s")
    return text
