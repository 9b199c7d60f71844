"""A still picture of a run, for `farcast status`."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from farcast.dashboard.figures import human_age, human_count
from farcast.dashboard.tables import overview, policy_table, replica_table
from farcast.fleet.observe import FleetSnapshot


def status_view(snapshot: FleetSnapshot, *, away: str = "") -> RenderableType:
    """Trainer, newest step and replicas, one below the other. `away` says why this is old."""
    parts: list[RenderableType] = [_trainer_line(snapshot)]
    if away:
        parts.append(Text(away, style="red"))
    if snapshot.replicas:
        parts += [_fleet_line(snapshot), Text()]
    if snapshot.steps and snapshot.replicas:
        parts.append(overview(snapshot.steps, snapshot, killed=set()))
    elif snapshot.steps:
        parts += [Text(), policy_table(snapshot.steps)]
    elif snapshot.replicas:
        parts.append(replica_table(snapshot, killed=set()))
    if not snapshot.replicas:
        parts.append(Text("No replica has joined yet.", style="yellow"))
    return Group(*parts)


def _trainer_line(snapshot: FleetSnapshot) -> Text:
    trainer = snapshot.trainer
    if trainer is None:
        return Text("No trainer has started on this store yet.", style="yellow")
    text = Text(f"run {trainer.run_id}\n", style="bold")
    text.append(
        f"trainer {trainer.state}, step {trainer.step}, version {trainer.version}",
        style="green" if trainer.state in ("training", "done") else "yellow",
    )
    if snapshot.trainer_written is not None:
        ago = human_age(max(0.0, snapshot.seen - snapshot.trainer_written))
        lost = snapshot.trainer_life in ("silent", "dead")
        text.append(f"  (said {ago} ago)", style="red" if lost else "dim")
    return text


def _fleet_line(snapshot: FleetSnapshot) -> Text:
    """`replicas  2 alive, 1 dead, 410 tokens/s, up to 2 versions behind`"""
    lives = Counter(snapshot.life(name) for name in snapshot.replicas)
    alive = [name for name in snapshot.replicas if snapshot.life(name) == "alive"]
    behind = max((snapshot.staleness(name) or 0 for name in alive), default=0)
    parts = [f"{count} {life}" for life, count in sorted(lives.items())]
    parts.append(f"{human_count(snapshot.tokens_per_second)} tokens/s")
    if behind:
        parts.append(f"up to {behind} version{'s' * (behind > 1)} behind")
    relayed = sum(snapshot.replicas[name].record.bytes_relayed for name in snapshot.replicas)
    fetched = sum(snapshot.replicas[name].record.bytes_fetched for name in snapshot.replicas)
    if relayed:
        parts.append(f"{relayed / max(fetched, relayed):.0%} from relays")
    text = Text("replicas  ", style="dim")
    text.append(", ".join(parts))
    return text
