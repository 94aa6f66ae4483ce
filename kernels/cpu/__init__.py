"""Native ops for CPUs: C++ built once by the machine's compiler, called through ctypes."""
