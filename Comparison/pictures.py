def draw_all(r,f): return []
