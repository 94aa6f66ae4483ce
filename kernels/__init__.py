"""Hand-written operations, one a file: contract, reference, device code, launcher. Chosen by `dispatch`."""
