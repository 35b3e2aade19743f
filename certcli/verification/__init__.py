"""Claims, checked again from the weights: a proof leaf by leaf, evidence entry by entry."""
