"""What was claimed, checked again from the weights: a report's proof leaf by leaf, a checkpoint's
evidence entry by entry.
"""
