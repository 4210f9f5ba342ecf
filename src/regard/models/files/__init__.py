"""The files of models: tensors as they are stored, and their headers. Must not know models."""
