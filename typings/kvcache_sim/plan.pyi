from .trace import TraceData

class ExecutionPlan:
    warmup_requests: int

def build_execution_plan(trace: TraceData) -> ExecutionPlan: ...
