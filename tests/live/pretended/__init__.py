"""A CUDA device that is only pretended: CUDA's code paths, run and checked without a GPU.

Tensors say ``cuda:0`` and are computed on the CPU.  What a GPU would punish is an error here:
operations across devices, host access to device memory, and accesses that no stream, event or
synchronisation puts in order (vector clocks; Mattern 1989).  See `pretend` in `arming`.

What it cannot see: numbers of CUDA's own kernels, kernels that run out of registers or shared
memory, time, memory that the allocator rounds up, and reads of page-locked memory through NumPy
arrays after they were made.
"""
