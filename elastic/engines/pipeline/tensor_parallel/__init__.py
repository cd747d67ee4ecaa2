"""How the ranks of one layer compute it together: heads of attention, and parts of its feed-forward networks.

Way in: `exchange.StepExchange` sends and receives what the ranks have computed, `cut_modules.CutModules` has modules
compute a part of themselves. The forward pass of `pipeline.forward` imports both. (AMOEBA, section 3)
"""
