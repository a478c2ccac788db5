"""Do a recorded step again, from its files, in a scratch folder: unchanged it must come out bit for bit, or with one factor changed.

    newest checkpoint ≤ step − 1, or the start model ─▶ the steps between, on their recorded rollouts ─▶ sample ─▶ learn ─▶ compare

Updates are `learn` on what the rollouts file says the step trained on, so nothing is sampled to get anywhere, and what a run
carries in trainer, objective and optimizer comes out as it was. Pool and queue of the budgeted and the asynchronous loop are in
no file but the checkpoints: before one of their steps can be sampled, those between are sampled again too. The run folder is
only read, and never locked.
"""
