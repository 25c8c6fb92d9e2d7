"""What kvjax costs beside its reference: one file a question."""
