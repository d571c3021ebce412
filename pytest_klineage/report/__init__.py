"""Tables and figures from recorded verdicts: pure functions on records."""
