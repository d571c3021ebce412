"""Tables and figures from recorded verdicts: pure functions on records. Nothing is measured or judged here."""
