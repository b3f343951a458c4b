"""Looking after a model that was converted: whether it still is as its plan has it, and bringing that back.

Converting in the first place belongs to `converting`; what checkpoints need, to `saving`.
"""
