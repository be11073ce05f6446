"""Devices of meshes, as TensorFlow names them."""

from types import SimpleNamespace

from mtf_gradsync._private.libraries import mtf


def placement(devices):
    return mtf.placement_mesh_impl.PlacementMeshImpl(f"all:{len(devices)}", "", list(devices))


def cpus(number, task=None):
    where = "" if task is None else f"/job:worker/replica:0/task:{task}"
    return [f"{where}/device:CPU:{i}" for i in range(number)]


def gpu(number, links=(), bus=None, task=None):
    """What TensorFlow says of a GPU; links are numbers of other GPUs."""
    where = "" if task is None else f"/job:worker/replica:0/task:{task}"
    bus = f"0000:0{number}:00.0" if bus is None else bus
    return SimpleNamespace(
        name=f"{where}/device:GPU:{number}",
        physical_device_desc=f"device: {number}, name: Tesla V100, pci bus id: {bus}, "
        "compute capability: 7.0",
        locality=SimpleNamespace(
            links=SimpleNamespace(link=[SimpleNamespace(device_id=i) for i in links])
        ),
    )
