class BackpressureDetector:
    store_latency_ema: float
