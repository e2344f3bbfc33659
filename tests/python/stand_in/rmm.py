"""Stands in for RMM on a machine without a GPU: `DeviceBuffer`, over the CUDA driver alone."""

from device_memory import DeviceBuffer  # noqa: F401
