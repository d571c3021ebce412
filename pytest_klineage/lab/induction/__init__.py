"""Induction: from an expert kernel to a lineage, from lineages to skill cards. Using cards is the optimizers' part."""
