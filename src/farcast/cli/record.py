"""`farcast record`: production traffic becomes training data."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options

record = typer.Typer(
    name="record",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Record what passes between a harness and a replica, as trajectories.

`serve` stands between the two; `attach` says how a session ended, and then it goes home.

```
farcast record serve --store s3://bucket/run1 --journal recorder \\
    --upstream http://127.0.0.1:8200 --token-env TOKEN
farcast record attach --session ticket-17 --reward 1 --token-env TOKEN
```
""",
)

TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The recorder's bearer token, in a file.")
]
TokenEnv = Annotated[
    str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
]


@record.command()
def serve(
    store: options.Store,
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="The replica or gateway that answers.")
    ],
    journal: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Keep open sessions here, so that a recorder that is killed goes on with them.",
            show_default=False,
        ),
    ],
    worker: Annotated[
        str, typer.Option("--id", metavar="NAME", help="This recorder's name among the workers.")
    ] = "recorder",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen here.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Listen here; 0 takes a free port."),
    ] = 8300,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
    upstream_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The replica's token. [default: it needs none]"),
    ] = None,
    upstream_token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
    ] = None,
    spool: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep outcomes here while the store is away."),
    ] = None,
    tied: options.Tied = False,
) -> None:
    """Stand before a replica; requests with one `X-Farcast-Session` are one episode.

    Answers pass unchanged. A turn is on disk before it is said to be recorded, and a session
    goes home once its outcome is known. The engine must give token ids (vLLM does) and log-probs
    under the sampled distribution (vLLM: `--logprobs-mode processed_logprobs`).

    ```
    farcast record serve --store s3://bucket/run1 --journal recorder \\
        --upstream http://127.0.0.1:8200 --token-env TOKEN \\
        --upstream-token-env REPLICA_TOKEN
    farcast record attach --session ticket-17 --reward 1 --token-env TOKEN
    ```
    """
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.signals import StopRequest
    from farcast.gateway.extra import require_serving
    from farcast.gateway.tokens import read_token

    require_serving()
    from farcast.fleet.finding import open_archive
    from farcast.interop.journal import Journal
    from farcast.interop.record_process import RecordOptions, serve_recorder
    from farcast.interop.recording import Recorder
    from farcast.store import open_store
    from farcast.trajectory import TrajectorySender

    token, opened = read_token(token_file, token_env), open_store(store)
    behind = None
    if upstream_token_file is not None or upstream_token_env is not None:
        behind = read_token(upstream_token_file, upstream_token_env, what="upstream token")
    sender = TrajectorySender(opened, open_archive(opened).run_id, worker, spool=spool)
    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        serve_recorder(
            RecordOptions(upstream, host, port, token, behind),
            Recorder(sender, journal=Journal(journal)),
            stop,
        )


@record.command()
def attach(
    session: Annotated[str, typer.Option(metavar="NAME", help="The session that ended.")],
    reward: Annotated[float, typer.Option(metavar="N", help="What it earned.")],
    url: Annotated[
        str, typer.Option(metavar="URL", help="The recorder.")
    ] = "http://127.0.0.1:8300",
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Sessions of one question make a group.")
    ] = None,
    group_size: Annotated[int, typer.Option(metavar="N", min=1, help="How many those are.")] = 1,
    feedback: Annotated[
        str | None,
        typer.Option(metavar="TURN:TEXT", help="What was said of one of the model's turns."),
    ] = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
) -> None:
    """Say how a recorded session ended; it goes home, durable when this returns.

    ```
    farcast record attach --session ticket-17 --reward 0 \\
        --feedback "1:the file was not there"
    ```
    """
    from farcast.cli.recorder_client import post_outcome
    from farcast.gateway.tokens import read_token

    token = read_token(token_file, token_env)
    outcome: dict[str, object] = {"session": session, "reward": reward, "group_size": group_size}
    if group is not None:
        outcome["group_id"] = group
    if feedback is not None:
        turn, _, text = feedback.partition(":")
        if not turn.isdigit():
            raise typer.BadParameter("write the turn's number, a colon, and the text")
        outcome["feedback"] = [{"turn": int(turn), "text": text}]
    for name in post_outcome(url, token.header(), outcome):
        print(name)
