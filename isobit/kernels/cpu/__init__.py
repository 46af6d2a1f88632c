"""CPU kernels: C sources in `src/`, compiled once per instruction set (`build.py`) and called through ctypes
(`library.py`); `features.py` says which of them this machine can run. Every one of them gives the same bits."""
