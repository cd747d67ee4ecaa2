"""Several models on the same devices: each is deployed by an intent, and changes its configuration while it serves.

Way in: `deployments.Deployments`, which is `elastic.Deployments`. A deployment is a `Fleet` of its own. Which
configuration it has on which devices is estimated and placed below (`elastic.estimation`, and the room of deployment in
`elastic.planning`); here it is carried out by the verbs of its fleet. The room above `cluster/fleet`; the command line
imports it.
"""
