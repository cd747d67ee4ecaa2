"""How the weights of a decoder layer are cut over ranks, and where the parts lie on pages: pure functions of shapes.

Way in: `cut_plan.cut_layer` says which parameters are cut, and where; `page_layout.cut_layout` how the parts are stored
so that a rank that keeps one part gives the pages of the others back. Loading, policies and simulators import it;
nothing here knows a process or a tensor.
"""
