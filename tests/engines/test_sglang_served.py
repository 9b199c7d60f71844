"""`farcast replica --engine sglang` as a process before the fake of SGLang's routes."""

import sys
from pathlib import Path

from fake_sglang import FakeSglang
from group_engine import weights
from test_engine_contract import write_folder

from farcast import Publisher, open_store
from farcast.lineage import RunRecord
from farcast.store.archive import Archive
from servers import free_ports
from serving_world import RUN, TOKEN, Program, ask, ready


def test_sglang_is_served_salted_and_named(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="now"))
    publisher = Publisher(store, RUN)
    ref = publisher.publish(weights(0), step=0)
    model = write_folder(tmp_path / "model", weights(0))
    (port,) = free_ports(1)
    with FakeSglang.started(model) as fake:
        command = [sys.executable, "-m", "farcast", "replica", "--store", store.url]
        command += ["--engine", "sglang", "--engine-url", fake.address, "--model", str(model)]
        command += ["--port", str(port), "--token-env", "FARCAST_TEST_TOKEN", "--id", "r0"]
        replica = Program(command, tmp_path / "replica.log")
        try:
            for version in (0, 1, 2):
                ready(port, version)
                body = {"text": "the same prompt", "extra_key": "mine"}
                answer = ask(port, "POST", "/generate", body)
                assert answer.status == 200, replica.output()
                assert answer.headers["x-farcast-root-end"] == ref.root
                keys = [key for key, prompt in fake.cache if prompt == "the same prompt"]
                assert len(keys) == version + 1
                assert all(key.endswith(":mine") and key != "mine" for key in keys)
                assert answer.json["text"] == fake.answer("the same prompt", "another key")
                fake.cache = {k: v for k, v in fake.cache.items() if k[0] != "another key"}
                ref = publisher.publish(weights(version + 1), step=version + 1)
            before = fake.version
            for path in ("/update_weights_from_disk", "/pause_generation", "/flush_cache"):
                assert ask(port, "POST", path, {"model_path": "/tmp"}).status == 404
            assert ask(port, "POST", "/generate", {"text": "x"}, token=TOKEN + "x").status == 401
            assert before.startswith(f"{RUN}@2:") or before.startswith(f"{RUN}@3:")
        finally:
            replica.kill()
