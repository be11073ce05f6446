"""The folder on a disk, in memory and in an S3 over HTTP: objects that are created once."""

import threading

import ml_dtypes
import numpy as np
import pytest

from mtf_gradsync.islands import DamagedObjectError, replay
from mtf_gradsync.tools.islands import folder as folder_module
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.tensor_files import OtherTensorsError, TensorSpec
from tests.forked import Forked
from tests.tools.islands.conftest import merging
from tests.tools.islands.toy import PLAIN, Toy


@pytest.fixture(scope="module")
def s3():
    """The URL of a bucket of moto's server."""
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true"}  # fmt: skip
    client = boto3.client(
        "s3", endpoint_url=keys["AWS_ENDPOINT"], aws_access_key_id="x", aws_secret_access_key="x",
        region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket="islands")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        yield "s3://islands"
    server.stop()


@pytest.fixture(params=["disk", "memory", "s3"])
def url(request, tmp_path):
    """A new folder of each kind."""
    if request.param == "disk":
        return str(tmp_path / "a folder #1?%20é")
    if request.param == "memory":
        return f"memory://{tmp_path}"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def test_an_object_is_created_once(url):
    won = []

    def create(number):
        if Folder(url).create("decisions/2.json", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = Folder(url)
    assert len(won) == 1
    assert bytes(folder.read("decisions/2.json")) == str(won[0]).encode()
    assert folder.names("decisions") == ["2.json"]
    assert folder.read("decisions/3.json") is None
    # Who asks again, as after an answer that came too late, has created it.
    assert folder.create("decisions/2.json", str(won[0]).encode())
    folder.write("decisions/README", b"")
    aside = folder.set_aside("decisions/2.json")
    assert folder.names("decisions") == ["README"]
    assert bytes(folder.read(aside)) == str(won[0]).encode()
    folder.remove("decisions/README")
    assert folder.names("decisions") == []


def test_tensors_are_checked_before_they_are_read(url):
    folder = Folder(url)
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    folder.store("a.safetensors", {"a": 1}, {"w": value, "s": np.float32(1.0).reshape(())})
    specs = {"w": TensorSpec((2, 3), "float32"), "s": TensorSpec((), "float32")}
    found = folder.load("a.safetensors", specs)
    np.testing.assert_array_equal(found.tensors["w"], value)
    assert found.facts == {"a": 1}
    with pytest.raises(OtherTensorsError, match=r"the program has float32 of shape \[2, 4\]"):
        folder.load("a.safetensors", {**specs, "w": TensorSpec((2, 4), "float32")})
    with pytest.raises(DamagedObjectError, match="at most 10 are allowed"):
        folder.load("a.safetensors", most=10)
    with pytest.raises(DamagedObjectError, match="no name of an object"):
        folder.read("../a.safetensors")


def test_islands_and_a_merger_on_every_store(url):
    toy = Toy(url, "one", 2, wait_seconds=30.0, poll_seconds=0.01)
    with merging(url, PLAIN, keep_all=True):
        toy.begin()
        toy.steps(5, 1.0)
        toy.island.finish(toy.session)
    assert (toy.b, replay(Folder(url))) == (-3.0, [])


def test_a_store_that_cannot_be_reached_says_so(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(folder_module, "_RETRIES", {"max_retries": 0})
    with pytest.raises(FolderError, match="a in s3://islands/x cannot be read"):
        Folder("s3://islands/x").read("a")


_FORKS = """
import os, sys
from mtf_gradsync.islands import Folder
folder = Folder(sys.argv[1])
for name in ("before", "after"):
    if not os.fork():
        try:
            Folder(sys.argv[1]).write(name, b"b")
            print(folder.names(""), flush=True)
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    folder.write("own", b"c")
"""


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_used_a_folder_is_refused(tmp_path):
    """One that was forked before writes, and its parent goes on after both."""
    process = Forked(["-c", _FORKS, tmp_path])
    assert process.wait() == 0, process.errors()
    before, after = process.output().splitlines()
    assert before == "['before']"
    assert "was forked from" in after
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "own"]


def test_objects_are_files_of_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {
        "bytes": np.arange(3, dtype=np.int8), "scalar": np.float32(2.0).reshape(()),
        "narrow": np.ones((2, 3), ml_dtypes.bfloat16), "empty": np.zeros((0, 3)),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }  # fmt: skip
    folder = Folder(str(tmp_path))
    folder.store("object.safetensors", {"a": 1}, tensors)
    found = library.load((tmp_path / "object.safetensors").read_bytes())
    found["narrow"] = found["narrow"].view(ml_dtypes.bfloat16)
    own = folder.load("object.safetensors").tensors
    for name, value in tensors.items():
        for one in (found[name], own[name]):
            assert (one.dtype, one.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(one, value)
