"""Device memory over the CUDA driver, with what Dask and direct:// use of RMM's.

*Invariant:* memory is freed once, in the context that it was allocated in.
"""

import contextlib
import ctypes
import os

from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

DRIVER = ctypes.CDLL("libcuda.so.1")

#: How many buffers there are.
living = 0

#: Whether buffers are of the device's own pool, as those of RMM's asynchronous resource: such memory
#: belongs to no context, and has no handle for other processes.
POOL = os.environ.get("DEVICE_POOL") == "1"


def check(function, *arguments):
    code = getattr(DRIVER, function)(*arguments)
    if code != 0:
        raise RuntimeError(f"{function}: {code}")


def begin(device=0):
    """Makes a device's primary context current on this thread."""
    context = ctypes.c_void_p()
    check("cuInit", 0)
    check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    check("cuCtxSetCurrent", context)


@contextlib.contextmanager
def context():
    """A context on a thread that may have none, as CUDA's runtime makes it."""
    current = ctypes.c_void_p()
    check("cuInit", 0)
    check("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        begin()
    yield


class DeviceBuffer:
    def __init__(self, *, size=0, data=None):
        global living
        self.size = self.nbytes = size
        self.ptr = 0
        self.process = os.getpid()
        address = ctypes.c_uint64()
        with context():
            if size:
                if POOL:
                    check("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(size), None)
                else:
                    check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
            self.ptr = address.value
            living += 1
            if data is not None and size:
                check("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(size))

    @staticmethod
    def to_device(data):
        return DeviceBuffer(size=len(data), data=bytes(data))

    @property
    def __cuda_array_interface__(self):
        return {
            "data": (self.ptr, False),
            "shape": (self.size,),
            "strides": None,
            "typestr": "|u1",
            "version": 0,
        }

    def tobytes(self):
        data = ctypes.create_string_buffer(self.size)
        with context():
            if self.size:
                check("cuMemcpyDtoH_v2", data, ctypes.c_uint64(self.ptr), ctypes.c_size_t(self.size))
        return data.raw

    def __len__(self):
        return self.size

    def __del__(self):
        global living
        if getattr(self, "process", None) == os.getpid():
            living -= 1
            if self.ptr:
                with context():
                    if POOL:
                        check("cuMemFreeAsync", ctypes.c_uint64(self.ptr), None)
                    else:
                        check("cuMemFree_v2", ctypes.c_uint64(self.ptr))


@cuda_serialize.register(DeviceBuffer)
def to_cuda(buffer):
    return {}, [buffer]


@cuda_deserialize.register(DeviceBuffer)
def from_cuda(header, frames):
    (buffer,) = frames
    assert isinstance(buffer, DeviceBuffer), type(buffer)
    buffer.came = "device"
    return buffer


@dask_serialize.register(DeviceBuffer)
def to_host(buffer):
    return {}, [buffer.tobytes()]


@dask_deserialize.register(DeviceBuffer)
def from_host(header, frames):
    (data,) = frames
    buffer = DeviceBuffer.to_device(data)
    buffer.came = "host"
    return buffer
