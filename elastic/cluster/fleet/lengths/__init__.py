"""A fleet's policy of lengths: who takes a request, and which instances share their layers for long ones. (AMOEBA)

Way in: `controller.LengthController`.
"""
