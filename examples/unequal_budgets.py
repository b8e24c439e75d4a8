"""Clients with different budgets: what each is promised, and what weighing by precision gains.

Run it with `python examples/unequal_budgets.py`; it takes seconds.
"""

from sottovoce import Plan, simulate_many

# Five of the ten clients allow ε = 1, five ε = 16. (A file of id, epsilon, delta works as well:
# privacy={"clients": "budgets.csv"}.)
plan = Plan(privacy={"epsilon": [1, 16] * 5, "delta": 1e-5})
plans = [plan, plan.replace("server.weights=precision")]

runs = simulate_many(plans, seeds=[1, 2, 3])
for number, name in enumerate(["samples", "precision"]):
    mine = runs[3 * number : 3 * number + 3]
    accuracy = sum(run.accuracy for run in mine) / 3
    print(f"weights = {name:<10} test accuracy {accuracy:.1%}")

for client in runs[-1].record["clients"][:2]:
    print(f"a client with ε = {client['epsilon']:g} spent {client['spent']:.4f} "
          f"of its {client['capacity']:.4f} (μ²)")  # fmt: skip
print(runs[-1].guarantee)
