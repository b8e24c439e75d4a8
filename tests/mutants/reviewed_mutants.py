"""Deliberate privacy bugs by a reviewer who read the source and the promises, and no test.

They belong to `privacy_mutants.MUTANTS`, which turns each into a mutant: its name, the module, the
promise that it breaks, the property named for it, and the changes. docs/audit.md says how many of
them the tests of that day noticed. `AUTHORED` are no such bugs: their authors knew the tests.
"""

from __future__ import annotations

Change = tuple[str, str]

REVIEWED: list[tuple[str, str, str, str, tuple[Change, ...]]] = [
    (
        "the ε that holds is no longer rounded up",
        "privacy.gaussian",
        "Every ε that is shown must hold: this one is rounded down, below the exact one, so that records and `calibrate` claim an ε that the noise does not keep.",
        "tests/privacy/test_gaussian.py::test_delta_and_epsilon_are_never_below_exact_and_tight",
        (("answer * (1 + MARGIN) + 1e-13)", "answer * (1 - MARGIN))"),),
    ),
    (
        "a tiny δ becomes the claim of pure ε-DP",
        "privacy.gaussian",
        "The δ of a release is never 0: an underflowed δ is told as 0, which claims pure ε-DP of a Gaussian release, and an attacker's likelihood ratio is unbounded all the same.",
        "tests/privacy/test_gaussian.py::test_the_edges_are_on_the_private_side",
        (("least = np.where(np.asarray(mu) > 0, np.finfo(np.float64).tiny, 0.0)", "least = 0.0"),),
    ),
    (
        "the attacker's view is rounded to the nearest",
        "privacy.budget",
        "What the card and `calibrate` say nobody exceeds (TPR, AUC) is rounded up: here it is rounded down half of the time, and the best attacker does better than what is printed.",
        "tests/server/test_federation_promises.py::test_what_no_attacker_exceeds_is_never_rounded_down",
        (
            (
                'return float(Decimal(f"{value:.12g}").quantize(step, rounding=ROUND_CEILING))',
                'return float(Decimal(f"{value:.12g}").quantize(step))',
            ),
        ),
    ),
    (
        "classes counted on the labels are no leak",
        "privacy.budget",
        "The text says «are (ε, δ)-DP» without a condition although the number of classes was read off private labels: whoever sees the model's shape learns that somebody has the last label.",
        "tests/server/test_federation_promises.py::test_what_was_taken_raw_is_a_condition_of_the_claim",
        (
            (
                'LEAKS = ("raw-signal", "median-clip", "inferred-columns", "counted-classes", "evaluation-in-unit")',
                'LEAKS = ("raw-signal", "median-clip", "inferred-columns", "evaluation-in-unit")',
            ),
        ),
    ),
    (
        "where no budget is told, nothing else is told",
        "privacy.budget",
        "A run whose clients all keep their budgets must still say that its transport was plaintext or its vaults fresh: the codes are dropped, and a listener's view is passed off as covered.",
        "tests/server/test_federation_promises.py::test_where_no_budget_is_told_what_is_not_covered_is",
        (
            (
                "all_codes = tuple(dict.fromkeys([*ALWAYS_NOT_COVERED, *codes]))",
                "all_codes = ALWAYS_NOT_COVERED",
            ),
        ),
    ),
    (
        "noise repeats itself beyond 65,536 values",
        "privacy.secure_noise",
        "Every coordinate has noise of its own: in a model of more than 2¹⁶ parameters the same noise is used again, and the server subtracts one part of the upload from another.",
        "tests/statistics/test_secure_noise.py::test_neighbours_and_chunks_share_nothing",
        (
            (
                "        piece = noise[start : start + _CHUNK]\n",
                "        piece = noise[start : start + _CHUNK]\n        if start:  # drawn already: a copy is ten times as fast\n            piece[:] = noise[: piece.size]\n            continue\n",
            ),
        ),
    ),
    (
        "the noise's tails are cut at 4σ",
        "privacy.secure_noise",
        "The noise is exactly discrete Gaussian, without a cut tail: with one, a single coordinate beyond 4σ of D's answer (6 in 100,000 each) proves that it was not D, whatever ε says.",
        "tests/statistics/test_secure_noise.py::test_every_integer_has_its_probability",
        (
            (
                "source, staircase = _Stream(), build_envelope(sigma)",
                "source, staircase = _Stream(), build_envelope(sigma, reach=4)",
            ),
            (
                "        values[i], accepted[i] = _propose_from_tail(bar[i] == bars, staircase, source)",
                "        accepted[i] = False  # so far out that another proposal is quicker",
            ),
        ),
    ),
    (
        "the loss borrows the noise of the model",
        "client.release",
        "Noise is never used twice: the loss gets the noise of the model's first number, which is smaller than what was priced, and the two figures of one answer share it, so that one takes it off the other.",
        "a_loss_has_noise_of_its_own",
        (
            (
                "noise = (secure_noise.draw(count, sigma) for sigma in paid.noise)",
                "noise = [secure_noise.draw(count, sigma) for sigma in paid.noise]",
            ),
            ("int(secure_noise.draw(1, paid.loss_noise)[0])", "int(noise[0][0])"),
        ),
    ),
    (
        "a step of nothing has no noise",
        "client.release",
        "An upload is made of noised values only: a client whose clipped sum is zero sends the model back unchanged, which tells the server for certain that no record has a gradient there.",
        "the_noise_paid_for_is_there",
        (
            (
                "        now = _apply_sum(now, _sum_clipped(form, now, x, y, recipe, own) + drawn, recipe, samples)",
                "        step = _sum_clipped(form, now, x, y, recipe, own)\n        now = _apply_sum(now, step + drawn if step.any() else step, recipe, samples)",
            ),
        ),
    ),
    (
        "a receipt of another vault is overlooked",
        "client.device",
        "A server's receipt that the ledger does not contain makes a client refuse: a client whose vault was replaced by a fresh one (a fresh budget for the same rows) answers all the same.",
        "tests/hostile/test_requests.py::test_a_receipt_that_the_vault_did_not_give_is_refused",
        (
            (
                "if request.receipt is not None and not vault.contains(request.receipt):",
                "known = request.receipt is None or request.receipt.vault != vault.id\n        if not known and not vault.contains(request.receipt):",
            ),
        ),
    ),
    (
        "the greeting counts the classes on the labels",
        "client.device",
        "A greeting holds public numbers only: its number of classes follows from the client's own labels, and a server reads off it whether anybody has the last (rare) diagnosis.",
        "tests/client/test_node_tables.py::test_a_greeting_does_not_depend_on_any_row",
        (
            (
                '"classes": rows.classes,\n                "policy"',
                '"classes": int(rows.y.max()) + 1,\n                "policy"',
            ),
        ),
    ),
    (
        "the client's log has the words of an error",
        "client.device",
        "A log has the kind of an error only, because logs are copied to other machines: the words of a DataError hold the cell of a row.",
        "tests/flower/test_worker.py::test_no_cell_of_a_bad_table_is_in_a_log",
        (
            (
                'return f"{type(error).__name__} ({Path(frame.f_code.co_filename).name}, line {line})"',
                'return f"{type(error).__name__} ({Path(frame.f_code.co_filename).name}, line {line}): {error}"',
            ),
        ),
    ),
    (
        "a node file tightens ε alone",
        "client.device",
        "What an operator tightens in the node file holds from the next message on: a raised floor, a lowered δ or disclose = false are ignored while ε stays, and servers go on getting the budget.",
        "tests/client/test_device.py::test_what_is_disclosed_is_the_promise_and_never_less_than_what_was_released",
        (
            (
                "        if wanted != vault.policy:\n",
                "        if wanted.epsilon != vault.policy.epsilon:\n",
            ),
        ),
    ),
    (
        "a silent client tells its floor",
        "client.device",
        "A policy that discloses nothing keeps ε, δ and the floor out of greetings: the default floor is 2/√capacity, from which a server reads what the budget is worth.",
        "hidden_budgets_stay_hidden",
        (('"floor": policy.floor if policy.disclose else None,', '"floor": policy.floor,'),),
    ),
    (
        "missing cells get the column's mean",
        "data.tables",
        "A row's numbers follow from that row and public bounds: with the mean of private cells in every gap, one record moves the gradients of all rows with gaps, beyond 2C.",
        "tests/client/test_node_tables.py::test_replacing_a_row_changes_no_other_row_that_a_node_reads",
        (
            (
                "return np.asarray(scaled.fill_null(np.nan), np.float64)",
                'return np.asarray(scaled.fill_null(strategy="mean").fill_null(0.5), np.float64)',
            ),
        ),
    ),
    (
        "features are centred over the pictures",
        "models.features",
        "A record's features change only if the record does: centred over all pictures of a piece, one replaced picture moves every other row, and the sum by far more than its sensitivity.",
        "tests/client/test_node_tables.py::test_what_a_row_contributes_does_not_depend_on_the_others",
        (
            (
                "values = values - np.mean(values, axis=1, keepdims=True)",
                "values = values - np.mean(values, axis=0, keepdims=True)",
            ),
        ),
    ),
    (
        "validation and test rows are dealt to clients too",
        "data.partition",
        "Validation and test rows belong to no client: here clients train on rows that the server holds in the clear, steers by and tells an unnoised loss of.",
        "tests/server/test_federation_promises.py::test_no_row_that_the_server_holds_is_a_clients",
        (
            (
                "shared, rest = order[: validation + test], order[validation + test :]",
                "shared, rest = order[: validation + test], order",
            ),
        ),
    ),
    (
        "classes are counted over the clients as well",
        "data.federated",
        "With one array a client the number of classes comes from the public rows, else it is refused: counted over all, the model's shape tells that one client has a label nobody else has.",
        "tests/server/test_federation_promises.py::test_the_number_of_classes_of_clients_arrays_comes_from_public_rows",
        (
            (
                "    classes = _find_classes([validation, test], target)\n",
                "    classes = _find_classes([validation, test, *(h for h, _ in clients)], target)\n",
            ),
        ),
    ),
    (
        "a model that exits on a sample ends the answer",
        "models.base",
        "A sample on which a client's own code fails has no gradient, and nothing else happens: a SystemExit that one sample causes ends the fork, and the server sees the silence.",
        "tests/server/test_federation_promises.py::test_a_sample_on_which_own_code_exits_counts_as_nothing_and_ends_nothing",
        (
            (
                "except BaseException:  # an exit that a sample causes would tell of it, too",
                "except Exception:",
            ),
        ),
    ),
    (
        "the cnn's biases are not in the norm",
        "models.cnn",
        "Gradients are cut to C over all parameters together: with the biases left out of the norm, a record whose gradient lies in them moves the sum by more than C.",
        "tests/models/test_clipping.py::test_no_row_adds_more_than_the_clip",
        (
            (
                "squared = jnp.sum(kernels**2, axis=(1, 2, 3, 4)) + base.squared_norms(biases)",
                "squared = jnp.sum(kernels**2, axis=(1, 2, 3, 4))",
            ),
            (
                "squared += base.squared_norms(error2) * (squared_hidden + 1)",
                "squared += base.squared_norms(error2) * squared_hidden",
            ),
        ),
    ),
    (
        "a budget tightened later limits nothing",
        "client.vault.vault",
        "A budget tightened after the first release limits what follows: here the limit is that of the first promise, and servers go on up to the old ε.",
        "a_budget_tightened_later_limits_what_follows",
        (
            (
                "return self.policy.count_parts(self._books.capacity)",
                "return self.promised.count_parts(self._books.capacity)",
            ),
        ),
    ),
    (
        "a tightened cap is rounded up",
        "client.vault.policy",
        "A tightened budget is a cap rounded down in units: rounded up, the last release exceeds what the new (ε, δ) is worth.",
        "tightened_caps_are_within_their_budget",
        (
            (
                "return int(FULL * now / Fraction(capacity))",
                "return math.ceil(FULL * now / Fraction(capacity))",
            ),
        ),
    ),
    (
        "record becomes client after releases",
        "client.vault.policy",
        "What was released for one record is not (ε, δ) for the whole data set: the certificate's head and the greetings then promise the whole data set for uploads that had a record's noise.",
        "a_policy_is_only_tightened",
        (
            (
                "if new.unit != old.unit and (UNITS.index(new.unit) < UNITS.index(old.unit) or spent > 0):",
                "if new.unit != old.unit and UNITS.index(new.unit) < UNITS.index(old.unit):",
            ),
        ),
    ),
    (
        "the default floor is rounded to the nearest",
        "client.vault.policy",
        "One turn takes at most a quarter of the budget: a floor rounded down lets a request take more.",
        "no_turn_takes_more_than_a_quarter",
        (
            (
                'self._set_field("floor", float(format_claim(math.sqrt(USUAL_TURNS / capacity))))',
                'self._set_field("floor", float(f"{math.sqrt(USUAL_TURNS / capacity):.6g}"))',
            ),
        ),
    ),
    (
        "what a restore burns fixes no promise",
        "client.vault.journal",
        "The promise is the budget that stood at the first release: after a backup from before it was restored, tightening makes the lost releases look as if they had been under the smaller ε.",
        "what_a_restore_burns_was_promised_before",
        (("        if burnt:\n            self.promised = self.promised or self.policy\n", ""),),
    ),
    (
        "a restore does not ask the machine's own witness",
        "client.vault.rebinding",
        "A pair of vault and witness that was copied and put back is noticed by the machine's witness: left out here, `--restored --nothing-since` gives back all that was spent since.",
        "a_restore_asks_the_machine_too",
        (
            (
                "for proof in (seen, known) if proof is not None",
                "for proof in (seen,) if proof is not None",
            ),
        ),
    ),
    (
        "a receipt without `spent` restores for free",
        "client.vault.rebinding",
        "A server's receipt can only show that a backup is too old: taken as a proof it burns nothing, and everything released after the backup is given back.",
        "a_receipt_that_says_no_sum_restores_nothing",
        (
            (
                '    elif any(proof.seq > newest_known for proof in unknown):\n        why = "the newer receipt does not say how much was spent"\n',
                "",
            ),
        ),
    ),
    (
        "storing an upload bears no witness",
        "client.vault.chest",
        "No round has two answers: the state before the store, put back, is taken for the newest, and the round that has left is answered again with fresh noise.",
        "a_state_before_a_store_is_not_taken_for_the_newest",
        (
            (
                "                self._write_witnesses(kind)\n",
                '                if kind != "store":  # it books nothing: the next line will tell\n                    self._write_witnesses(kind)\n',
            ),
        ),
    ),
    (
        "a receipt is known by its number alone",
        "client.vault.chest",
        "A file that has parted from the one that gave a receipt is refused: compared by line number alone, two copies of a vault each spend the whole budget.",
        "a_receipt_is_a_line_and_not_a_number",
        (
            (
                "return self._journal.has_gap(seq) if line is None else line.hash == receipt.hash",
                "return line is not None or self._journal.has_gap(seq)",
            ),
        ),
    ),
    (
        "the machine's own witness is written once",
        "client.vault.chest",
        "The machine's witness follows every line: left at the first one, an old copy of vault and witness written back into the same file is served, and its budget is spent twice.",
        "an_older_pair_is_not_taken_for_the_newest",
        (
            (
                "        witness.write_machine_witness(self.receipt())\n        try:\n",
                "        try:\n",
            ),
        ),
    ),
    (
        "a backup is readable by every account",
        "client.vault.rebinding",
        "A backup is treated as data, for the client's account alone: it holds the fingerprint, against which whoever reads it tries out the one cell that it does not know.",
        "tests/server/test_federation_promises.py::test_backups_and_keys_are_for_their_owner_alone",
        (("draft.touch(mode=0o600, exist_ok=False)", "draft.touch(exist_ok=False)"),),
    ),
    (
        "a line's salt follows from its content",
        "client.vault.chain",
        "The salt keeps receipts from confirming a guess: derived from the line itself, whoever knows all records but one tries that one out against the hash in a receipt.",
        "receipts_cannot_be_tried_out",
        (
            (
                '"salt": os.urandom(32).hex()',
                '"salt": hashlib.sha256(encode_canonical(dict(facts)).encode()).hexdigest()',
            ),
        ),
    ),
    (
        "certificates keep quiet about the operator's word",
        "client.ledger",
        "What rests on the operator's word alone stands on the certificate: without it a restore with --nothing-since looks proven, and who relies on it cannot see the gap.",
        "tests/server/test_federation_promises.py::test_a_certificate_says_what_rests_on_the_operators_word",
        (
            (
                "text += _describe_word(line)",
                "text += ''",
            ),
        ),
    ),
    (
        "verify does not ask the witnesses",
        "client.ledger",
        "`ledger verify` says whether a newer state is known: without that a rolled-back vault is called whole, and its refunded budget goes unnoticed.",
        "tests/server/test_federation_promises.py::test_a_vault_that_is_not_the_newest_is_not_called_whole",
        (
            (
                '            ("witness", "whether a newer state is known", require_newest),\n',
                "",
            ),
        ),
    ),
    (
        "a damaged vault gets its certificate",
        "reports.certificate",
        "A vault is checked from end to end before it is certified: here uploads that were exchanged on the disk are certified as those that were sent.",
        "tests/server/test_federation_promises.py::test_a_damaged_vault_gets_no_certificate",
        (("    ledger.verify(path).require()\n", "    ledger.verify(path)\n"),),
    ),
    (
        "the certificate's head has the tightened budget",
        "reports.certificate",
        "The promise is the budget of the first release: a head with the (ε, δ) chosen in hindsight claims less than what the uploads before it had.",
        "tests/server/test_federation_promises.py::test_a_certificates_head_has_the_budget_of_the_first_release",
        (
            (
                'budget = f"({format_claim(promised.epsilon)}, {format_claim(promised.delta, 3)})"',
                'budget = f"({format_claim(statement.policy.epsilon)}, {format_claim(statement.policy.delta, 3)})"',
            ),
        ),
    ),
    (
        "the loss is not held against the books",
        "server.checks",
        "The noise of model and loss together is worth no more than was booked: without the loss a client that never paid for it is accepted, round after round.",
        "tests/hostile/test_uploads.py::test_a_loss_that_nothing_was_booked_for",
        (
            (
                "        ratios.append(expected.loss_sensitivity / loss_sigma)\n",
                "        ratios += []\n",
            ),
        ),
    ),
    (
        "a budget may be worth more than its (ε, δ)",
        "server.members",
        "A record's (ε, δ) holds for every client: a client whose capacity is more than its ε buys is taken in, and the record states an ε that its noise does not keep.",
        "tests/server/test_federation_promises.py::test_a_client_whose_budget_is_worth_more_than_its_epsilon_is_not_taken_in",
        (
            (
                '        if self.capacity > most * (1 + 1e-6):\n            raise Malformed("the client\'s budget is worth more than its (ε, δ)")\n',
                "",
            ),
        ),
    ),
    (
        "a vault of records takes part in a plan for clients",
        "server.coordinator",
        "The record's unit is that of every client's vault: a vault whose other releases protect single records is promised (ε, δ) for its whole data set.",
        "tests/server/test_federation_guarantee.py::test_a_client_takes_part_for_the_unit_of_its_vault_only",
        (
            (
                "if member.unit != plan.local.unit:",
                'if member.unit == "client" and plan.local.unit == "record":',
            ),
        ),
    ),
    (
        "requests bring no receipt",
        "server.coordinator",
        "Only the receipts that servers bring back give away an image of a whole machine: packed once for all clients, requests have none, and a client set back to an image spends twice.",
        "tests/server/test_coordinator.py::test_every_client_is_asked_with_the_newest_receipt_it_gave",
        (
            (
                "{i: replace(request, receipt=roll.members[i].receipt).to_blob() for i in waiting}",
                "dict.fromkeys(waiting, request.to_blob())",
            ),
        ),
    ),
    (
        "the loosest client is the one with the largest ε",
        "server.federation",
        "The guarantee is that of the client with the loosest promise: by ε alone, a client with a slightly smaller ε and a far larger δ is promised what it has not.",
        "tests/server/test_federation_guarantee.py::test_every_client_has_the_stated_epsilon_and_delta",
        (
            (
                "plan, worth = self.plan, self._compute_worth()",
                "plan, worth = self.plan, self.epsilon",
            ),
        ),
    ),
    (
        "the paper's ε of random cohorts is that of balanced ones",
        "server.federation",
        "Under `paper` the ε that holds is told: random cohorts take up to two fifths of the clients more often than ⌈qT⌉ times, and for them the figure is too small.",
        "tests/server/test_federation_promises.py::test_under_paper_the_epsilon_told_covers_the_client_that_is_asked_most",
        (
            (
                'if isinstance(self.schedule, FixedRounds) and self.terms.cohort == "balanced":',
                "if isinstance(self.schedule, FixedRounds):",
            ),
        ),
    ),
    (
        "private rows may be dealt by a Dirichlet draw",
        "plan.plan",
        "With secure noise private rows are not dealt by their labels: here one person's label moves the rows of every other client, which no client's sensitivity counts.",
        "tests/simulation/test_secure.py::test_private_rows_are_not_dealt_by_their_labels",
        (
            (
                'if private and self.data.split in ("labels", "dirichlet"):',
                'if private and self.data.split == "labels":',
            ),
        ),
    ),
    (
        "the record tells how many rows a silent client has",
        "runs.record",
        "A client that discloses nothing has no n in the run's record: here n stands there and in splits.npz, and with σ it gives the budget away.",
        "tests/server/test_coordinator.py::test_what_clients_keep_to_themselves_is_in_no_record",
        (('"samples": if_disclosed(federation.samples),', '"samples": federation.samples,'),),
    ),
    (
        "the public file has the clients' rows",
        "data.federated",
        "What the server is given holds no training rows: here every client's rows stand in the file that the server reads, unnoised.",
        "tests/server/test_federation_promises.py::test_the_file_of_public_rows_holds_no_clients_row",
        (
            (
                "    for name in PUBLIC_SETS:\n        rows: Samples",
                '    for name in (*PUBLIC_SETS, "train"):\n        rows: Samples',
            ),
        ),
    ),
    (
        "vaults made for one run are taken for lasting ones",
        "data.federated",
        "The guarantee of a run with fresh vaults speaks of this run alone: read back without the mark, it claims (ε, δ) for all runs over the same rows, each of which has a budget of its own.",
        "tests/server/test_federation_promises.py::test_public_rows_that_are_read_back_keep_the_mark_of_fresh_vaults",
        (
            (
                "        none, nobody, validation, test, None, shape, classes, layout, fresh_vaults=fresh\n",
                "        none, nobody, validation, test, None, shape, classes, layout\n",
            ),
        ),
    ),
    (
        "dealt rows are readable by every account",
        "flower.federate",
        "A client's rows lie in folders for their owner alone: made with the usual mode, every account of the machine reads the rows and the vaults' fingerprints.",
        "tests/server/test_federation_promises.py::test_dealt_rows_are_in_folders_for_their_owner_alone",
        (
            (
                "(out / NODES).mkdir(mode=0o700)",
                "(out / NODES).mkdir()",
            ),
            ("    folder.mkdir(mode=0o700)\n", "    folder.mkdir()\n"),
        ),
    ),
    (
        "clients share the noise of a local step",
        "simulation.compiled",
        "Every client draws noise of its own: with one draw for all in each of several local steps, the server takes one upload from another and has the difference of two raw steps.",
        "simulated_steps_have_noise_of_their_own",
        (("jax.random.fold_in(key, e * clients + i)", "jax.random.fold_in(key, e)"),),
    ),
    (
        "streamed rows have the same noise in every round",
        "simulation.streamed",
        "Every release has fresh noise: with round 0's in all rounds, the difference of two rounds is the difference of two raw gradients.",
        "streamed_rounds_have_noise_of_their_own",
        (
            (
                "np.uint32(paid.round.t), np.float32(paid.std))",
                "np.uint32(0), np.float32(paid.std))",
            ),
        ),
    ),
    (
        "a secure run's debit is not written before its release",
        "simulation.secure",
        "A debit is on the disk before anything is released: killed in a round, `train --resume` goes on from the books before it and releases the round a second time for nothing.",
        "tests/simulation/test_secure.py::test_a_round_released_before_a_kill_is_never_free",
        (("            self.before_release(run.state)\n", ""),),
    ),
    (
        "a run without a vault promises for all runs",
        "simulation.simulate",
        "A secure run whose budget is in no vault speaks of itself alone: without the code the text claims (ε, δ) for each client's uploads as such, and five runs have five times the budget.",
        "tests/simulation/test_secure.py::test_a_run_with_secure_noise_spends_no_more_than_it_has",
        (
            (
                'not_covered=(*not_covered, *(["unvaulted"] if federation.plan.noise == "secure" else [])),',
                "not_covered=not_covered,",
            ),
        ),
    ),
    (
        "accuracy by client is told on training rows",
        "server.federation",
        "Accuracy by client is shown only on rows that clients declared public: on training rows it is one more release of each client, exact and unpaid, in the record.",
        "tests/data/test_tables.py::test_accuracy_by_client_is_not_shown_without_declared_rows",
        (
            (
                "    owner = held.test_owner\n",
                "    owner = held.test_owner\n    if owner is None and held.split is not None:\n        labels, owner = held.train.y, held.owner\n        predicted, scores = _answer(federation, params, held.train)\n        calibrated = scores\n",
            ),
        ),
    ),
    (
        "the plan's own table is refused by its spelling",
        "studies.rehearsal.standin",
        "Settings are never chosen on the clients' rows: named by another path or a link, the private table itself is rehearsed on, and every chosen setting is an unpaid release.",
        "tests/server/test_federation_promises.py::test_settings_are_not_chosen_on_the_plans_own_table_by_any_name",
        (
            (
                "if isinstance(file, str | Path) and Path(file).exists() and path.samefile(file):",
                "if isinstance(file, str | Path) and Path(file).exists() and path == Path(file):",
            ),
        ),
    ),
    (
        "rows said to be public count as published",
        "studies.rehearsal.standin",
        "What a rehearsal cost rests on the operator's word where a file was given: the plan and the card then say «none; no private row was read» of rows that may be a client's.",
        "tests/server/test_federation_promises.py::test_what_a_rehearsal_cost_rests_on_the_operators_word_where_a_file_was_given",
        (
            (
                'origin="own" if is_own else "published" if published else "said",',
                'origin="own" if is_own else "published",',
            ),
        ),
    ),
    (
        "an audit's contradictions leave μ to the reader",
        "studies.audit.findings",
        "The exit code of an audit follows from its contradictions: with those of μ left out of the list, a client with half the noise passes the audit.",
        "tests/server/test_federation_promises.py::test_an_audit_that_refutes_mu_says_so",
        (
            (
                "            if measurement.refutes_mu:\n",
                "            if measurement.refutes_mu and measurement.refutes_epsilon:\n",
            ),
        ),
    ),
    (
        "the card rounds its ε to the nearest",
        "reports.pages",
        "An ε or δ that is claimed is rounded up: 30.3142 is shown as 30.31, which does not hold.",
        "tests/server/test_federation_promises.py::test_a_printed_epsilon_is_never_smaller_than_the_one_that_holds",
        (
            (
                "return format_number(float(format_claim(value, max(digits, whole))), digits)",
                "return format_number(value, digits)",
            ),
        ),
    ),
    (
        "the attacker's view is that of what was spent",
        "reports.run",
        "The guarantee is the cap, not the gauge: of a run that stopped early, the card bounds the attacker by the realised sum, which under adaptive stopping is no bound.",
        "tests/server/test_federation_promises.py::test_the_attacker_on_the_card_is_the_one_at_the_cap",
        (
            (
                "return math.sqrt(float(np.nanmax(self.clients.capacity)))",
                "return math.sqrt(float(np.nanmax(self.clients.spent)))",
            ),
        ),
    ),
    (
        "calibrate promises the paper's own ε",
        "schedules.calibrate",
        "Under `paper` the guarantee names the ε that holds: here (20, 10⁻³) is promised where 30.3 holds, and an attacker has ten nats more.",
        "tests/server/test_federation_promises.py::test_calibrate_promises_what_its_noise_keeps",
        (("Budget(max(paper_epsilon, 1e-6) if is_paper else ask.epsilon,", "Budget(ask.epsilon,"),),
    ),
    (
        "a transport that cannot tell counts as encrypted",
        "flower.server_app",
        "A record must not promise what is not known: a grid that does not say whether it is encrypted is taken for TLS, and the record keeps quiet about a listener.",
        "tests/server/test_federation_promises.py::test_plaintext_is_refused_unless_it_was_allowed_and_then_it_is_told",
        (
            (
                'return getattr(grid, "_insecure", True) is False',
                'return not getattr(grid, "_insecure", False)',
            ),
        ),
    ),
    (
        "a run that goes on may do so in plaintext",
        "flower.server_app",
        "Plaintext is refused unless it was allowed: a run that was begun over TLS and is resumed without it goes on, and a listener reads every upload.",
        "tests/server/test_federation_promises.py::test_plaintext_is_refused_unless_it_was_allowed_and_then_it_is_told",
        (
            (
                'if not secure and not config["insecure"]:',
                'if not secure and not config["insecure"] and not config["resume"]:',
            ),
        ),
    ),
    (
        "SuperNodes are not authenticated",
        "flower.local",
        "Node authentication is on: without it whoever reaches the port greets with another client's vault id and answers in its place.",
        "tests/server/test_federation_promises.py::test_nodes_authenticate_themselves_and_run_what_is_installed",
        (('            argv.append("--enable-supernode-auth")\n', ""),),
    ),
    (
        "nodes run what the server ships",
        "flower.local",
        "A node answers with the sottovoce that its operator installed: by default it now executes the server's bundle, which may read the rows and send them.",
        "tests/server/test_federation_promises.py::test_nodes_authenticate_themselves_and_run_what_is_installed",
        (("    app: str | None = worker.APP,\n", "    app: str | None = None,\n"),),
    ),
    (
        "a worker takes a secret of any length",
        "flower.worker",
        "The secret proves to the SuperNode that it hands messages to this worker: one of a single byte is tried out at once, and any process of the machine takes the messages and answers them.",
        "tests/flower/test_worker.py::test_a_worker_that_cannot_begin_says_so_in_a_sentence",
        (("    if len(secret) < SHORTEST_SECRET:\n", "    if not secret:\n"),),
    ),
    (
        "a log line has the traceback's words",
        "flower.processes",
        "A line of a node's log has the kind of an exception and never its words, which may hold a value of a row; whatever collects logs is another machine.",
        "tests/flower/test_worker.py::test_a_formatter_keeps_the_kind_of_an_exception_alone",
        (
            (
                '            words["error"] = record.exc_info[0].__name__\n',
                '            words["error"] = self.formatException(record.exc_info)\n',
            ),
        ),
    ),
    (
        "keys are readable by the group",
        "flower.certificates",
        "Keys are readable by their owner alone: another account of the machine takes the node's key and speaks for it, or the authority's and for the server.",
        "tests/server/test_federation_promises.py::test_backups_and_keys_are_for_their_owner_alone",
        (
            (
                "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)",
                "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)",
            ),
        ),
    ),
    (
        "a demonstration in plaintext calls itself encrypted",
        "flower.federate",
        "What is said at the start must hold: of an --insecure run it is said that every message is encrypted, and an operator who believes it listens to nobody's warning.",
        "tests/server/test_federation_promises.py::test_a_demonstration_in_plaintext_does_not_call_itself_encrypted",
        (("show.say(INSECURE if options.insecure else SECURE)", "show.say(SECURE)"),),
    ),
]

# By those who wrote the code and its tests.
AUTHORED: list[tuple[str, str, str, str, tuple[Change, ...]]] = [
    (
        "a sum's noise alone is not booked",
        "client.device",
        "Both accounts are booked before anything is computed: what the noise alone costs is missing in one.",
        "tests/server/test_sum_round.py::test_both_accounts_grow_with_every_sum",
        (
            (
                "alone = count_units(change, masked[0], vault.capacity)",
                "alone = sum(paid.units)",
            ),
        ),
    ),
    (
        "a set is forgotten with the process",
        "client.vault.vault",
        "One set a round, durable: a client that was started anew signs a second one.",
        "tests/server/test_sum_round.py::test_two_sets_are_refused_by_a_client_that_was_started_anew",
        (
            (
                'self._chest.append("note", [("note", facts)])',
                'self._chest.append("note", [("note", facts)]) if step != "set" else None',
            ),
        ),
    ),
    (
        "the account of one's own noise has no end",
        "client.vault.vault",
        "A policy caps both: without the second cap everyone together learns more than ε_alone.",
        "tests/server/test_sum_round.py::test_both_accounts_are_booked_and_neither_is_exceeded",
        ((" or all_alone > self.limit_alone:", ":"),),
    ),
    (
        "a retried input draws new noise",
        "client.device",
        "A retry gets the stored bytes: two inputs with one mask differ by their noises.",
        "tests/server/test_sum_round.py::test_a_retried_input_is_the_stored_one",
        (
            (
                "if entry.upload is not None and not is_key_step:",
                "if entry.upload is not None and request.sum is None:",
            ),
        ),
    ),
    (
        "S1: one signature is enough",
        "client.sum_protocol",
        "A share is revealed before t clients have signed the set: a server that shows every client another set unmasks single inputs.",
        "tests/hostile/test_sum_view.py::test_s1_nothing_is_revealed_before_t_signatures_on_one_set",
        (("if len(signed) < cohort.threshold:", "if len(signed) < 1:"),),
    ),
    (
        "S1: signatures are counted and not checked",
        "client.sum_protocol",
        "A signature is its member's word on one set: counted unchecked, the server writes them itself.",
        "tests/hostile/test_sum_view.py::test_a_lie_told_to_everyone_ends_in_nothing",
        (('is_signed(m, "set", bound, signatures.get(m))]', "signatures.get(m)]"),),
    ),
    (
        "S1: signatures of clients outside the set",
        "client.sum_protocol",
        "The members of a set sign it: with other clients' signatures a server opens an input that was made for fewer dealers.",
        "tests/hostile/test_sum_view.py::test_an_input_made_for_fewer_dealers_is_not_opened_with_another_list",
        (("signed = [m for m in members if", "signed = [m for m in dealers if"),),
    ),
    (
        "S2: a second set is unmasked",
        "client.sum_protocol",
        "One set a round: with the set and the set without one client the server subtracts and has that client's input.",
        "tests/hostile/test_sum_view.py::test_s2_two_sets_of_one_round_are_never_unmasked",
        (
            (
                'if self._find_note(cohort, "set") != bound:',
                'if self._find_note(cohort, "set") is None:',
            ),
        ),
    ),
    (
        "S2: two sets are signed",
        "client.sum_protocol",
        "An honest client signs one set: with two signatures of each, two sets have t signatures.",
        "tests/hostile/test_sum_view.py::test_s2_two_sets_of_one_round_are_never_unmasked",
        (("        elif noted != content:", '        elif noted != content and step != "set":'),),
    ),
    (
        "S3: both shares of a client that dropped out",
        "client.sum_protocol",
        "With key and seed of one client all its masks are known, and its late input is plain.",
        "tests/hostile/test_sum_view.py::test_s3_no_client_reveals_both_shares_of_one_client",
        (("for m in dealers if m in members},", "for m in dealers},"),),
    ),
    (
        "S4: strangers are counted on",
        "client.sum_protocol",
        "h + c counts roster members: a server that invents clients is otherwise alone with one.",
        "tests/hostile/test_sum_view.py::test_s4_strangers_count_for_nothing",
        (
            ("known = len(self.terms.roster.intersection(members))", "known = len(members)"),
            (
                "strangers = len(cohort.keys.keys() - self.terms.roster)",
                "strangers = 0 * len(cohort.keys.keys() - self.terms.roster)",
            ),
        ),
    ),
    (
        "S4: strangers' noise is counted on",
        "client.sum_protocol",
        "Only roster members' promises make up for this client's noise: a server's own client adds none.",
        "tests/hostile/test_sum_view.py::test_s4_strangers_count_for_nothing",
        (
            (
                "for member in dealers if member in counted]",
                "for member in dealers if member in counted or member != self.member]",
            ),
        ),
    ),
    (
        "S5: the same streams in every round",
        "client.sum_protocol",
        "A stream of masks serves one round: used twice, the difference of two inputs is plain.",
        "tests/hostile/test_sum_view.py::test_s5_a_stream_of_masks_serves_one_round_of_one_run",
        (('"mask", run, t)', '"mask", run)'),),
    ),
    (
        "S6: masks instead of noise",
        "client.release",
        "The noise is inside the masked value: without it the unmasked sum is exact.",
        "tests/hostile/test_sum_view.py::test_s6_the_noise_is_inside_the_masked_value",
        (
            (
                "noised = _sum_clipped(form, start, x, y, recipe, own) + drawn",
                "noised = _sum_clipped(form, start, x, y, recipe, own) + drawn // 2",
            ),
        ),
    ),
    (
        "S7: an input says how large it is",
        "client.release",
        "What a client says besides its masked input depends on no row.",
        "tests/hostile/test_sum_view.py::test_s6_the_noise_is_inside_the_masked_value",
        (
            (
                'messages.pack({**head, "noise": noise}, {MASKED: sent})',
                'messages.pack({**head, "noise": noise, "size": int(abs(noised).max())}, {MASKED: sent})',
            ),
        ),
    ),
    (
        "a threshold that two sets can reach",
        "client.sum_protocol",
        "2t > K + c: with 2t = K + c the corrupt clients sign both of two sets.",
        "tests/hostile/test_sum_view.py::test_a_server_that_lies_is_refused_and_learns_no_single_input",
        (
            (
                "if 2 * cohort.threshold <= len(cohort.keys) + corrupt + strangers:",
                "if 2 * cohort.threshold < len(cohort.keys) + corrupt + strangers:",
            ),
        ),
    ),
    (
        "the largest promises are counted on",
        "client.sum_protocol",
        "The clients that turn out corrupt may be those with the largest noise: only the smallest promises are sure.",
        "tests/hostile/test_sum_view.py::test_the_noises_of_a_round_make_up_for_every_client",
        (
            (
                "counted = sorted(others)[: honest - 1]",
                "counted = sorted(others, reverse=True)[: honest - 1]",
            ),
        ),
    ),
    (
        "a set of other dealers than the input was masked for",
        "client.sum_protocol",
        "An input is hidden by the masks that its dealers share: with other dealers in the set, fewer of them than it counts on may be left.",
        "tests/hostile/test_sum_view.py::test_a_server_that_lies_is_refused_and_learns_no_single_input",
        (
            (
                'if self._find_note(cohort, "dealers") not in (None, cohort.bind_dealers(dealers)):',
                'if self._find_note(cohort, "dealers") == cohort.digest:',
            ),
        ),
    ),
    (
        "keys that nobody signed",
        "client.sum_protocol",
        "A mask key is its member's own: unsigned, the server puts its own in every place and reads every mask.",
        "tests/hostile/test_sum_view.py::test_a_server_that_lies_is_refused_and_learns_no_single_input",
        (
            (
                'if not is_signed(key.member, "key", key.content, key.signature):',
                "if not is_hex(key.signature, 64):",
            ),
        ),
    ),
    (
        "a partition from Python moves private rows by their labels",
        "server.federation",
        "With secure noise an upload depends on its client's rows alone: dealt by their labels, one person's row moves the rows of every other client.",
        "tests/simulation/test_simulate_parts.py::test_a_partition_never_moves_private_rows_by_their_labels_with_secure_noise",
        (
            (
                'if plan.noise == "secure" and (plan.data.path is not None',
                'if plan.noise == "none" and (plan.data.path is not None',
            ),
        ),
    ),
    (
        "an estimator does not name its sites' evaluation rows",
        "simulation.estimators",
        "What a guarantee does not cover is named: rows of sites are set aside and evaluated without noise.",
        "tests/simulation/test_estimators.py::test_sites_keep_their_rows_and_their_evaluation_rows_are_named",
        (("tests_clients=client is not None", "tests_clients=False"),),
    ),
    (
        "an estimator does not say that it counts classes",
        "simulation.estimators",
        "What a guarantee does not cover is named: the classes are those of all clients' labels.",
        "tests/simulation/test_estimators.py::test_a_classifier_learns_and_says_what_it_promises",
        (("counted=target is None,", "counted=False,"),),
    ),
    (
        "a tracker gets the names of files and columns",
        "runs.integrations",
        "Only public numbers leave for a tracker, and nothing of the section data.",
        "tests/runs/test_integrations.py::test_only_public_numbers_leave",
        (
            (
                'in ("model", "local", "privacy", "rounds", "server"):',
                'in ("data", "local", "privacy"):',
            ),
        ),
    ),
    (
        "a description promises less than it spends",
        "client.describe",
        "The ε of a release is that of μ = Δ/σ: here Δ is taken for one record that is added, half of what one that is replaced moves.",
        "tests/client/test_describe.py::test_the_promise_is_not_better_than_that_of_opendp",
        (
            (
                "    mu2 = (float(recipe.sensitivity(samples)) / sigma) ** 2",
                "    mu2 = (float(recipe.sensitivity(samples)) / 2 / sigma) ** 2",
            ),
        ),
    ),
    (
        "a description does not count that noise is whole numbers",
        "client.describe",
        "Noise on a grid promises a little less than continuous noise (docs/proofs.md, c): here the stated ε is that of the latter.",
        "tests/client/test_describe.py::test_what_is_stated_is_never_below_what_is_proven",
        (
            (
                'calibration.bound_epsilon(known["delta"], mu2)',
                'calibration.gaussian.epsilon(known["delta"], np.sqrt(mu2))',
            ),
        ),
    ),
    (
        "a description of a client with few rounds takes more than its share",
        "client.describe",
        "Where a run may have fewer rounds than the share needs, the noise is scaled up: here the first of these few rounds is paid.",
        "tests/client/test_describe.py::test_no_description_takes_more_than_the_share_it_names",
        (("    return Round(0, most, math", "    return Round(0, most) or (0, math"),),
    ),
    (
        "a description takes more than its share",
        "client.describe",
        "A description may take the share of the budget that its operator names: here it takes all that one run may.",
        "tests/client/test_describe.py::test_a_description_takes_its_share_of_the_vault_and_no_more",
        (("        return Round(0, rounds)\n", "        return Round(0, 1)\n"),),
    ),
    (
        "rows dealt without their persons are called persons",
        "data.federated",
        "unit = person is promised only where a sample is a person: here streamed rows are dealt in order before anybody asks for the ids, and each row counts as a person.",
        "tests/models/test_person.py::test_streamed_rows_and_single_arrays_promise_no_persons",
        (
            (
                '        if plan.local.unit == "person":\n            raise InputError(\n                "person must be given',
                '        if plan.local.unit == "nobody":\n            raise InputError(\n                "person must be given',
            ),
            (
                "        if len(held.train.y) and held.train.x.shape[1] == int(np.prod(held.inputs)):\n",
                "        if False:\n",
            ),
        ),
    ),
    (
        "ids of persons decide who holds what",
        "data.federated",
        "Replacing one person must not deal the others anew: here persons are numbered by their sorted ids, so that one other id moves the rows of every client.",
        "tests/models/test_person.py::test_another_id_of_one_person_deals_nobody_else_anew",
        (("    order = np.argsort(first)\n", "    order = np.arange(len(first))\n"),),
    ),
    (
        "the run folder counts the rows of persons",
        "runs.record",
        "Of persons only their number is public: here the row numbers in splits.npz tell how many rows somebody has.",
        "tests/models/test_person.py::test_the_run_folder_does_not_tell_how_many_rows_a_person_has",
        (
            (
                "        if federation.plan.rows_per_person:  # how many rows a person has is not public\n",
                "        if False:\n",
            ),
        ),
    ),
    (
        "a person's gradients are added, not averaged, after the clip of each row",
        "models.person",
        "With unit = person the clip must bind all rows of a person together: here each row is its own sample of the block, so that a person with k rows moves the sum k times as far.",
        "tests/models/test_person.py::test_the_mean_gradient_of_a_person_is_clipped",
        (
            (
                "            means.append(np.matmul(left.swapaxes(1, 2), right).reshape(len(x), -1))\n        return np.concatenate(means, axis=1)",
                "            means.append(np.einsum('pka,pkb->pkab', left, right).reshape(len(weight), -1))\n        return np.concatenate(means, axis=1)",
            ),
        ),
    ),
    (
        "a person with few rows is padded with nothing",
        "models.person",
        "Work must not tell how many rows a person has: here only rows with a weight are computed.",
        "tests/models/test_person.py::test_work_does_not_tell_how_many_rows_a_person_has",
        (
            (
                "        block = Products.of(self.code.gradient_block(params, rows, labels)).flush_tiny()\n",
                "        used = weight > 0\n        found = Products.of(self.code.gradient_block(params, rows[used], labels[used])).write_out()\n        whole = np.zeros((len(used), found.shape[1]))\n        whole[used] = found\n        block = Products.of(whole).flush_tiny()\n",
            ),
        ),
    ),
    (
        "the rows of a person beyond the limit are those of the file's end",
        "models.person",
        "What a person contributes depends on its own rows alone: here the choice depends on the position in the file, which other persons' rows decide.",
        "tests/models/test_person.py::test_a_sample_is_a_person_whatever_the_order_of_rows",
        (
            (
                'order = np.lexsort((np.frombuffer(b"".join(digests), np.uint64), person))',
                "order = np.lexsort((-np.arange(len(person)), person))",
            ),
        ),
    ),
    (
        "a server may ask a client of persons for records",
        "client.device",
        "The client's policy decides what is protected: here a request for unit record is answered, and its text promises less than the vault.",
        "tests/models/test_person.py::test_a_server_cannot_have_less_protected",
        (
            (
                "    if UNITS.index(unit) < UNITS.index(policy.unit):\n",
                '    if policy.unit == "client" and unit != "client":\n',
            ),
        ),
    ),
    (
        "persons are split row by row",
        "data.federated",
        "A person who is validated or tested on is shown to the server raw: with unit = person nobody may be both trained and tested on.",
        "tests/models/test_person.py::test_nobody_is_both_trained_and_tested_on",
        (
            (
                "        dealt = deal_persons(dealt, whose, owner)\n",
                "        dealt = replace(deal_persons(dealt, whose, owner), validation=np.arange(5))\n",
            ),
        ),
    ),
    (
        "a client's Δ counts rows where persons are protected",
        "data.federated",
        "n is the number of persons: with the number of rows Δ would be too small by the rows of a person, and the noise with it.",
        "tests/models/test_person.py::test_nobody_is_both_trained_and_tested_on",
        (
            (
                "    samples = np.bincount(np.unique(at_client) // persons, minlength=len(held.samples))\n",
                "    samples = np.bincount(at_client // persons, minlength=len(held.samples))\n",
            ),
        ),
    ),
    (
        "persons and records have ledgers of their own",
        "client.node",
        "Identical rows have one ledger on a machine: with another fingerprint for persons two budgets for the same rows add up unseen.",
        "tests/models/test_person.py::test_rows_have_one_ledger_whatever_is_protected",
        (
            (
                "return replace(rows, x=x, y=no_labels,",
                "return replace(rows, x=x, y=no_labels, fingerprint=fingerprint(x, no_labels),",
            ),
        ),
    ),
    (
        "results by client are named without a declaration",
        "server.federation",
        "A client's results are listed by its name only where the plan declares its evaluation rows public.",
        "tests/server/test_federation.py::test_sites_keep_their_names_and_results_where_rows_are_declared_public",
        (('plan.data.evaluation == "public" or not federation.evaluates_on_clients', "True"),),
    ),
    (
        "test rows calibrate the probabilities that they test",
        "server.federation",
        "Log loss, Brier score and calibration error on rows that the calibration was fitted on are too good.",
        "tests/server/test_federation.py::test_test_rows_that_steer_do_not_calibrate",
        (
            (
                "    is_separate = held.validation is not held.test and federation.plan.data.validation != 0\n",
                "    is_separate = True\n",
            ),
        ),
    ),
    (
        "a model within the noise is called better",
        "models.metrics",
        "A model that has learnt nothing would be headed as better than always the same answer in half of all runs.",
        "tests/models/test_metrics.py::test_a_model_of_chance_is_seldom_called_better",
        (("gain > ERRORS * self.error + ", "gain > "),),
    ),
    (
        "a row of least squares is cut by the length of all rows",
        "models.least_squares",
        "One record moves the sum by its own vector alone: here a long row shortens all the others, too.",
        "tests/models/test_least_squares.py::test_a_replaced_row_moves_the_sum_by_the_sensitivity_at_most",
        (("xp.sum(x**2, axis=1, keepdims=True)", "xp.sum(x**2)"),),
    ),
    (
        "the clip of least squares forgets the inputs",
        "models.least_squares",
        "A row adds at most C: here its norm is taken to be that of one of the two factors of its moments.",
        "tests/models/test_clipping.py::test_no_row_adds_more_than_the_clip",
        (("base.squared_norms(x) * base.squared_norms(z)", "base.squared_norms(z)"),),
    ),
    (
        "a hidden budget is shown as a full one",
        "runs.checkpoint",
        "Of a client that keeps its budget to itself nobody is told what is left: a page that follows its run would call it full.",
        "tests/reports/test_watch.py::test_the_budget_left_is_that_of_clients_that_disclose_it",
        (("return meta, np.where(hidden or False, np.nan, left)", "return meta, left"),),
    ),
    (
        "the h - 1 largest promises of others are counted on",
        "privacy.calibration",
        "The noise that protects in a sum is that of whoever is honest, at worst of those who add least.",
        "tests/server/test_federation_observers.py::test_the_noise_of_any_h_honest_clients_is_enough",
        (("ordered = np.sort(values, axis=-1)", "ordered = -np.sort(-values, axis=-1)"),),
    ),
    (
        "one promise too many is counted on",
        "schedules.pricing",
        "A client counts itself and h - 1 others: with h others it relies on one more than its policy allows.",
        "tests/server/test_federation_observers.py::test_the_noise_of_any_h_honest_clients_is_enough",
        (
            (
                "add_smallest(promised, honest - 1)",
                "add_smallest(promised, min(honest, promised.shape[-1] - 1))",
            ),
        ),
    ),
    (
        "noise is divided by the root of h twice",
        "schedules.pricing",
        "With h equal clients each adds σ/√h; divided again, the sum has only σ²/h in all.",
        "tests/server/test_federation_observers.py::test_the_noise_of_any_h_honest_clients_is_enough",
        (("np.sqrt(variance) / samples,", "np.sqrt(variance / honest) / samples,"),),
    ),
    (
        "a sum of h clients is unmasked, c of them corrupt",
        "server.rounds",
        "Of h + c clients at least h are honest; of h alone c may know their own noise.",
        "tests/server/test_federation_observers.py::test_fewer_than_h_and_c_clients_upload_nothing_and_pay_nothing",
        (("terms.honest + terms.corrupt", "terms.honest"),),
    ),
    (
        "what a client's own noise costs is not booked",
        "runs.record",
        "If all others turn against it, a client has only its own noise: the record must say what that is worth.",
        "tests/server/test_federation_observers.py::test_both_books_of_a_run_hold",
        (
            (
                '{"spent_alone": if_disclosed(sum_alone(federation, state))}',
                '{"spent_alone": if_disclosed(state.tank.spent_mu2)}',
            ),
        ),
    ),
    (
        "the promise alone is that of the sum",
        "server.federation",
        "Whatever anyone does, a client that shares its noise is held to less than its budget says.",
        "tests/server/test_federation_observers.py::test_both_books_of_a_run_hold",
        (
            (
                "np.maximum(self.terms.honest, honest) * self.capacity)",
                "self.capacity)",
            ),
        ),
    ),
    (
        "noise that colluding clients know protects in the models",
        "privacy.calibration",
        "Clients that tell what they know have their noise subtracted: only that of the others protects.",
        "tests/server/test_federation_observers.py::test_no_set_of_colluding_clients_learns_more_than_the_model_view_says",
        (("max(noise.shape[-1] - 1 - colluding, 0)", "noise.shape[-1] - 1"),),
    ),
    (
        "the colluding clients are those that add least noise",
        "privacy.calibration",
        "The worst others to lose are those whose noise protects most.",
        "tests/server/test_federation_observers.py::test_no_set_of_colluding_clients_learns_more_than_the_model_view_says",
        (("honest = add_smallest(noise, ", "honest = -add_smallest(-noise, "),),
    ),
    (
        "colluding clients count in the cap of an adaptive run",
        "server.federation",
        "Of K equal clients K - c protect each other against an observer with c of them.",
        "tests/server/test_federation_observers.py::test_an_adaptive_schedule_is_bounded_for_equal_clients_only",
        (("(len(self.capacity) - c)", "len(self.capacity)"),),
    ),
    (
        "the sum as played is stated of every schedule",
        "server.federation",
        "After an adaptive stop the realised sum is no guarantee.",
        "tests/server/test_federation_observers.py::test_an_adaptive_schedule_is_bounded_for_equal_clients_only",
        (("if self.schedule.steady and finished and ", "if finished and "),),
    ),
    (
        "the sum of a run that was stopped is stated",
        "server.federation",
        "Whoever stops a run may have looked at its models: what was released so far is no bound.",
        "tests/server/test_federation_observers.py::test_a_fixed_schedule_that_did_not_end_states_nothing",
        (("if self.schedule.steady and finished and ", "if self.schedule.steady and "),),
    ),
    (
        "several local steps are seen through the mean",
        "server.federation",
        "Before its second step a client has only its own noise: the others' do not protect what it computes there.",
        "tests/server/test_federation_observers.py::test_an_adaptive_schedule_is_bounded_for_equal_clients_only",
        (("if self.recipe.releases > 1:", "if self.recipe.releases > 10**9:"),),
    ),
    (
        "a run that goes on is resumed by a second process",
        "data.files",
        "Two processes that go on from one checkpoint each spend what is left of the budgets in it.",
        "tests/data/test_files.py::test_a_run_is_held_while_it_is_played_and_refused_to_a_second_process",
        (('_lock_folder(folder, "LOCK_EX")', '_lock_folder(folder, "LOCK_SH")'),),
    ),
    (
        "a network may mix the samples of a batch a little",
        "models.network",
        "A network that is quantised by the range of a batch moves the features of 63 other records when one is replaced.",
        "tests/models/test_network.py::test_a_network_that_cannot_be_used_is_refused",
        (("for factor in _COMPANIES:", "for factor in ():"),),
    ),
    (
        "a table has another fingerprint than its old vault",
        "client.node",
        "The second ledger of rows that version 0.1 has kept one for would go unnoticed, and their budget would be spent twice.",
        "tests/client/test_node_tables.py::test_a_vault_of_version_0_1_knows_its_table",
        (("target=target), low=0.0)", "target=target))"),),
    ),
    (
        "a restored backup keeps its own terms of sums",
        "client.vault.rebinding",
        "Terms of sums are free until the first release: a backup of before states (ε, δ) for lost sums as if each upload had all its noise.",
        "a_restore_states_the_terms_of_lost_sums",
        (
            (
                "policy = _recall_promise(books, unknown, books.spent + burnt)",
                "policy = books.policy",
            ),
        ),
    ),
    (
        "a restore takes any promise that a receipt names",
        "client.vault.rebinding",
        "A receipt is a file from anywhere: one that names a smaller ε than was spent would be stated.",
        "a_restore_takes_no_promise_that_cannot_be_true",
        (("if spent <= promise.count_parts(books.capacity):", "if spent:"),),
    ),
    (
        "a restore takes a looser promise from a receipt",
        "client.vault.rebinding",
        "The vault would take the terms of a forged receipt for its own.",
        "a_restore_takes_no_promise_that_cannot_be_true",
        (("            require_tighter(books.policy, promise, spent=0)\n", ""),),
    ),
    (
        "a receipt without what was spent alone counts by the backup's share",
        "client.vault.rebinding",
        "Tightening ε raises the share that holds alone; the backup does not know it.",
        "a_restore_counts_what_was_spent_alone_at_the_most",
        (("alone.append(burnt * policy.honest)", "alone.append(burnt)"),),
    ),
    (
        "without proof the backup's terms of sums are taken for the lost ones",
        "client.vault.rebinding",
        "Nobody knows under which terms the first sums were released: only the loosest are true of all.",
        "a_restore_states_the_terms_of_lost_sums",
        (("honest=books.policy.most_honest, corrupt=0, epsilon_alone=None)", "corrupt=0)"),),
    ),
    (
        "a table is dealt to new vaults without a word",
        "flower.federate",
        "Rows that have vaults of an earlier run get others only on their owner's recorded word: without it, what is promised to a row adds up unnoticed.",
        "tests/flower/test_federate.py::test_rows_that_were_dealt_before_are_dealt_again_only_on_a_recorded_word",
        (
            (
                "    if earlier and not second_ledger:\n",
                "    if earlier and second_ledger is None:\n",
            ),
        ),
    ),
    (
        "a second ledger does not name the first",
        "flower.federate",
        "The vaults of a second run over a table name those of the first: left out, a certificate speaks of no other ledger of the same rows.",
        "tests/flower/test_federate.py::test_rows_that_were_dealt_before_are_dealt_again_only_on_a_recorded_word",
        (('"others": earlier', '"others": []'),),
    ),
    (
        "federate looks for vaults without a lock",
        "flower.federate",
        "Of two runs that start together over a table the second waits until the first has noted its vaults: without the lock both pass, and rows are promised twice unnoticed.",
        "tests/flower/test_federate.py::test_of_two_runs_that_start_together_over_one_file_the_second_is_refused",
        (("    with witness.hold_ledgers(file_hash):", "    if True:"),),
    ),
    (
        "a rebind looks for ledgers without a lock",
        "client.vault.rebinding",
        "Whoever looks for other ledgers of rows holds the lock until its own is noted: a rebind or move without it passes beside a creation, and rows are promised twice unnoticed.",
        "tests/client/vault/test_witness_identity.py::test_an_operators_word_waits_for_a_ledger_that_is_being_made",
        (
            ("        with witness.hold_ledgers(dataset):", "        if True:"),
            ("    with witness.hold_ledgers(books.dataset):", "    if True:"),
        ),
    ),
    (
        "an opening notes its ledger without a lock",
        "client.vault.chest",
        "A vault that nobody has noted is noted under the lock of its rows: without it, its opening passes beside a creation, and rows are promised twice unnoticed.",
        "tests/client/vault/test_witness_identity.py::test_an_operators_word_waits_for_a_ledger_that_is_being_made",
        (("        with witness.hold_ledgers(self.books.dataset):", "        if True:"),),
    ),
    (
        "rounds that nobody pays for fill the ledger",
        "client.vault.vault",
        "A key of the sum view costs no budget, so a client opens a bounded number of rounds that are never paid for: without the bound a server that only asks for keys fills the disk of every client.",
        "tests/server/test_sum_round.py::test_rounds_that_nobody_pays_for_do_not_fill_the_ledger",
        (("        if self._books.unpaid >= MOST_UNPAID:", "        if False:"),),
    ),
    (
        "a row of a torch chain may take longer",
        "models.torch_model",
        "Exponentials and products of a chain take the same time for every row: with a wider cut, a server whose weights push one row to e^-709 sees it in the time of an answer.",
        "tests/models/test_torch_model.py::test_no_row_of_a_chain_brings_numbers_that_take_longer",
        (("np.clip(-x, -170, 170)", "np.clip(-x, -709, 709)"),),
    ),
    (
        "what holds alone is that of continuous noise",
        "client.vault.policy",
        "A vault states for its noise alone what discrete noise costs: without the correction it states a smaller epsilon than is proven.",
        "tests/server/test_sum_round.py::test_what_holds_alone_pays_for_discrete_noise",
        (
            (
                "calibrations.bound_epsilon(self.delta, worth)",
                "calibrations.gaussian.epsilon(self.delta, math.sqrt(worth))",
            ),
        ),
    ),
    (
        "the table itself is a file of other rows",
        "plan.data",
        "Rows of a file that the server holds raw belong to nobody who is promised anything: with the clients' own table as that file, the guarantee covers rows of clients that the server has as they are.",
        "tests/data/test_tables.py::test_no_promise_is_made_where_the_server_holds_the_table_itself",
        ((" and os.path.realpath(v) == table]", " and False]"),),
    ),
]
