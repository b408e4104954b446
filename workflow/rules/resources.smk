# What jobs ask for: GPUs, and on a cluster memory and time.

# Whether jobs run elsewhere: the executor itself is known only after the rules are read. A job that runs there reads them
# once more, and asks for nothing.
on_cluster = workflow.resource_settings.nodes is not None

# No more jobs at once than this machine has GPUs; each takes its own (`tailrl.runtime.devices`). On a cluster, the
# scheduler hands them out.
if not on_cluster and visible() and "gpu" not in workflow.global_resources:
    workflow.register_resource("gpu", len(visible()))


# The ranks that a profile or the command line gives to a rule's jobs. Each needs a GPU, where there are any.
def ranks_of(rule):
    given = workflow.resource_settings.overwrite_resources.get(rule, {})
    return given["ranks"].value if "ranks" in given else 1


# A job's memory and time by the plan, for a cluster. On one machine nothing is asked for, and the plan is not read, since
# it imports torch.
asks = on_cluster and workflow.is_main_process
if asks:
    from tailrl.planning.plan import (
        comparison_request,
        evaluation_request,
        policy_request,
        training_request,
    )


def asked(request):
    if not asks:
        return {}
    return {
        "mem_mb": lambda wildcards: request(wildcards).mem_mb,
        "runtime": lambda wildcards: request(wildcards).runtime,
    }


# How many policies an arm's evaluation has.
def policies_of(wildcards):
    own = seeds[wildcards.study][wildcards.arm]
    if not snapshot_folders(wildcards.study, wildcards.arm):
        return len(own)
    return len(own) * (1 + len(run_of(wildcards).training.snapshots))


# No more processes than an arm has policies.
def sharing(wildcards):
    return min(ranks_of("evaluate"), policies_of(wildcards))
