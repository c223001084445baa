"""The papers' systems (Baleen, Differential Mamba, GroupMamba, GFSSM, the selective SSM of the generalisation paper),
MAD's tasks, and the training of small models.

It is added as another package would be: `entries` declares what it registers, and nothing else here imports it.
"""
