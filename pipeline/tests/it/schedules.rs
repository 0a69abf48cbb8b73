//! Tables of every kind and size, and the bubbles stated in the literature.

use proptest::prelude::*;

use pipeline::{Action, ActionKind, Durations, Schedule, ScheduleKind, Table};

fn uneven() -> impl Strategy<Value = Durations> {
    (1u32..9, 1u32..9, 1u32..9).prop_map(|(forward, input, weight)| Durations {
        forward: forward.into(),
        backward_input: input.into(),
        backward_weight: weight.into(),
        message: 0.0,
    })
}

fn size() -> impl Strategy<Value = (ScheduleKind, usize, usize, usize)> {
    (prop::sample::select(&ScheduleKind::ALL[..]), 1usize..10, 1usize..5, 1usize..40).prop_map(
        |(kind, ranks, stages, micro_batches)| {
            let free = matches!(kind, ScheduleKind::Interleaved | ScheduleKind::LoopedBfs);
            let stages = if free { stages } else { kind.stages_per_rank() };
            (kind, ranks, stages, micro_batches)
        },
    )
}

proptest! {
    #[test]
    fn every_table_is_a_schedule((kind, ranks, stages, micro_batches) in size(), durations in uneven()) {
        let schedule = Schedule::of(kind, ranks, stages, micro_batches).unwrap();
        let plan = schedule.plan(&durations);
        let work = (durations.forward + durations.backward_input + durations.backward_weight)
            * (stages * micro_batches) as f64;
        prop_assert!(plan.busy().iter().all(|busy| (busy - work).abs() < 1e-6));
        prop_assert!(plan.bubble() > -1e-9);
        for given in [durations, Durations::default()] {
            if let Some(bubble) = kind.bubble(ranks, stages, micro_batches, &given) {
                let got = schedule.plan(&given).bubble();
                prop_assert!((got - bubble).abs() < 1e-6, "{kind}, {ranks} x {stages}, {micro_batches}: {got}, not {bubble}");
            }
        }
        for (rank, &live) in schedule.live().iter().enumerate() {
            let most = match kind {
                ScheduleKind::Naive => 1,
                ScheduleKind::GPipe => micro_batches,
                ScheduleKind::OneFOneB => ranks - rank,
                ScheduleKind::Interleaved if stages == 1 => ranks - rank,
                ScheduleKind::Interleaved => (stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1,
                ScheduleKind::LoopedBfs => stages * micro_batches,
                ScheduleKind::ZbH1 => ranks,
                ScheduleKind::ZbV => 2 * ranks,
            };
            prop_assert!(live <= most, "{kind}: rank {rank} of {ranks} has {live} alive, not {most}");
        }
    }

    /// If an action is removed, duplicated or moved forward, either the checker reports it or the table is still valid.
    #[test]
    fn damage_is_found((kind, ranks, stages, micro_batches) in size(), place in any::<prop::sample::Index>(), how in 0..3) {
        let mut table = Table::of(kind, ranks, stages, micro_batches).unwrap();
        let rank = place.index(ranks);
        let at = place.index(table.actions[rank].len());
        let action = table.actions[rank][at];
        match how {
            0 => {
                table.actions[rank].remove(at);
                prop_assert!(Schedule::new(table).is_err(), "without {action}");
            }
            1 => {
                table.actions[rank].push(action);
                prop_assert!(Schedule::new(table).is_err(), "{action} twice");
            }
            _ => {
                // A backward before its forward waits for itself.
                if action.kind == ActionKind::Backward {
                    let forward = Action { kind: ActionKind::Forward, ..action };
                    let forward = table.actions[rank].iter().position(|other| *other == forward);
                    table.actions[rank].swap(at, forward.unwrap());
                    prop_assert!(Schedule::new(table).is_err());
                }
            }
        }
    }
}

#[test]
fn errors_say_what_is_wrong() {
    let line = |table: Table| Schedule::new(table).unwrap_err().to_string();
    let table = || Table::of(ScheduleKind::GPipe, 2, 1, 1).unwrap();
    let mut lacking = table();
    lacking.actions[1].retain(|action| action.kind != ActionKind::Backward);
    assert!(line(lacking).ends_with("rank 1 lacks backward for the input of micro-batch 0 in stage 1"));
    let mut silent = table();
    silent.actions[0].retain(|action| action.kind != ActionKind::SendActivation);
    let text = line(silent);
    assert!(
        text.contains(
            "rank 1 waits with receiving the input of micro-batch 0 in stage 1 for sending the output of micro-batch 0 in stage 0"
        ),
        "{text}"
    );
    let mut misplaced = table();
    let action = misplaced.actions[0].remove(0);
    misplaced.actions[1].insert(0, action);
    assert!(line(misplaced).contains("rank 1 has forward of micro-batch 0 in stage 0, which is rank 0's"));
    assert!(line(Table { owners: vec![], micro_batches: 1, actions: vec![] }).contains("0 ranks"));
    for (kind, stages) in [(ScheduleKind::GPipe, 2), (ScheduleKind::ZbV, 1), (ScheduleKind::Interleaved, 0)] {
        assert!(Table::of(kind, 2, stages, 2).is_err(), "{kind}");
    }
    let unknown = "2f2b".parse::<ScheduleKind>().unwrap_err().to_string();
    assert!(unknown.contains("give one of naive, gpipe, 1f1b"), "{unknown}");
}

#[test]
fn schedules_without_measure_are_refused_before_they_take_memory() {
    let many = [usize::MAX, usize::MAX / 3, 1 << 40, (1 << 20) + 1];
    for many in many {
        for [ranks, stages, micro_batches] in [[many, 1, 1], [1, many, 1], [1, 1, many], [many, 3, many]] {
            let error = Table::of(ScheduleKind::LoopedBfs, ranks, stages, micro_batches).unwrap_err();
            assert!(error.to_string().contains(&many.to_string()), "{error}");
        }
    }
}

/// The printed bubble is the fraction of empty cells in the grid.
#[test]
fn the_bubble_is_what_the_grid_shows() {
    for kind in ScheduleKind::ALL {
        for ranks in 1..=5 {
            for micro_batches in [1, 2, 3, 4, 5, 8, 11, 16] {
                let free = matches!(kind, ScheduleKind::Interleaved | ScheduleKind::LoopedBfs);
                for stages in if free { vec![1, 2, 3] } else { vec![kind.stages_per_rank()] } {
                    let schedule = Schedule::of(kind, ranks, stages, micro_batches).unwrap();
                    let shown = schedule.to_string();
                    let lines = shown.lines().filter(|line| line.starts_with("rank "));
                    let places: Vec<&str> = lines.flat_map(|line| line.split_whitespace().skip(2)).collect();
                    let empty = places.iter().filter(|place| **place == ".").count();
                    let expected = empty as f64 / places.len() as f64;
                    let what = format!("{kind}, {ranks} x {stages}, {micro_batches}\n{shown}");
                    let got = schedule.plan(&Durations::default()).bubble_fraction();
                    assert!((got - expected).abs() < 1e-12, "{got}, {empty} of {}: {what}", places.len());
                    assert!(shown.contains(&format!("\nbubble: {:.1} % of", 100.0 * expected)), "{what}");
                    // The grid contains all computations: three cells per micro-batch and stage.
                    assert_eq!(places.len() - empty, 3 * ranks * stages * micro_batches, "{what}");
                }
            }
        }
    }
}

/// Each of these schedules has a smaller bubble than the previous one, with everything else equal.
#[test]
fn each_schedule_is_better_than_the_one_before() {
    let fraction = |kind: ScheduleKind| {
        let stages = kind.stages_per_rank();
        // A rank has the same amount of work in all schedules.
        let part = 1.0 / stages as f64;
        let durations =
            Durations { forward: part, backward_input: part, backward_weight: part, message: 0.0 };
        Schedule::of(kind, 4, stages, 8).unwrap().plan(&durations).bubble_fraction()
    };
    let order = [
        ScheduleKind::Naive,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ];
    let fractions = order.map(fraction);
    assert!(fractions.windows(2).all(|pair| pair[0] > pair[1]), "{fractions:?}");
}

#[test]
fn a_grid_shows_who_does_what_when() {
    let grid = |kind, stages| Schedule::of(kind, 2, stages, 3).unwrap().to_string();
    let expected = "\
time   0  1  2  3  4  5  6  7  8  9  10 11
rank 0 F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
rank 1 .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
bubble: 25.0 % of the time; activations alive, by rank: 2 1
";
    assert_eq!(grid(ScheduleKind::OneFOneB, 1), expected);
    let expected = "\
time   0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   15   16   17   18
rank 0 F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2 .
rank 1 .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
bubble: 5.3 % of the time; activations alive, by rank: 4 4
";
    assert_eq!(grid(ScheduleKind::ZbV, 2), expected);
}
