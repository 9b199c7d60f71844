"""`farcast keygen`: a key to sign a run's versions with, and its public half for replicas."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The secret key; FILE.pub is the public one.")
    ],
    json: options.Json = None,
) -> None:
    """Make an Ed25519 key pair: the trainer signs with FILE, replicas pin FILE.pub.

    ```
    farcast keygen run1.key
    farcast train  --store s3://bucket/run1 --signing-key run1.key
    farcast worker --store s3://bucket/run1 --trusted-key run1.key.pub
    ```

    Replicas with a pinned key take nothing that the trainer did not sign: whoever can write to
    the store can then withhold versions, but never make one. FILE never leaves the trainer. To
    change keys, put both public keys one after the other into one file and pin that first.
    """
    from farcast.fleet.keys import PUBLIC_SUFFIX, write_pair

    options.check_writable(json)
    public = write_pair(file)
    (fingerprint,) = public.fingerprints
    print(f"{file} is secret: keep it with the trainer.")
    print(f"{file}{PUBLIC_SUFFIX} is public: pin it in replicas. Fingerprint {fingerprint}.")
    options.write_json(json, {"public": f"{file}{PUBLIC_SUFFIX}", "fingerprint": fingerprint})
