"""What a run starts from. No file here knows of a run that has begun.

pins             hub names of a recipe, pinned to commits
open_saved       opens a run, a checkpoint, a Hugging Face directory or an adapter for reading
model_plan       the model of a run: its shape, the rules of its parameters, what each layer recomputes
parameter_rules  which parameters are trained, and how
base_model       the model that a run began from: what checkpoints keep of it, and whether a frozen base is the same
restore          where a run starts: its newest checkpoint, another run's, or step 0
drift            settings that differ between a checkpoint and the recipe that would continue it
"""
