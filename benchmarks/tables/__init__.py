"""The papers' tables, run again: one documented command a row, figures beside the paper's
(docs/tables.md).
"""
