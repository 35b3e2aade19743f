"""Converters: a file of another library becomes timm's tensors and a record: the same function."""
