"""The ground floor: everything here is free of torch and may be imported by any service.

`common.engine` is the upper floor; only its `step` and `block_manager` modules are torch-free.
"""
