# cpp/module.cpp defines what the native module offers; compute/native.py is its only importer.
from typing import Any

def __getattr__(name: str) -> Any: ...
