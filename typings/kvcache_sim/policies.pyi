from .plan import ExecutionPlan

class PolicyResult:
    measurementMode: str
    hitTokens: int

def simulate_policy(plan: ExecutionPlan, policy: str, capacity: int) -> PolicyResult: ...
