"""Measures of a drafter: where its attention goes, how its states drift with depth, what is accepted of its drafts."""
