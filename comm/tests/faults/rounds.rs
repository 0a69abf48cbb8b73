//! Round after round: a random rank is killed at a random moment of a random collective.

use std::time::Duration;

use rustix::process::Signal;

use crate::ending::summary;
use crate::group::{Group, Setup};
use crate::script::Dice;
use crate::worker::now;

/// How many rounds; a few unless this variable says otherwise.
const ROUNDS: &str = "GIRANDOLE_FAULT_ROUNDS";
const FEW: usize = 6;

#[test]
fn a_random_rank_is_killed_at_a_random_moment() {
    let rounds = std::env::var(ROUNDS).map_or(FEW, |text| text.parse().unwrap());
    let seed = now();
    println!("seed {seed}");
    let mut dice = Dice(seed);
    let (mut last_errors, mut last_ends) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let world_size = 2 + dice.below(3) as usize;
        let victim = dice.below(world_size as u64) as usize;
        let script = format!("random {}", dice.below(1 << 40));
        let mut group = Group::start(&vec![script; world_size], &Setup::default());
        group.ready(group.all());
        // Not to wait for anything: the moment is to be random.
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
        let at = group.signal(victim, Signal::KILL);
        let (mut error, mut end): (f64, f64) = (0.0, 0.0);
        for ending in group.finish_all().iter().filter(|ending| ending.rank != victim) {
            ending.assert_blames("PeerDied", victim, "died during ");
            error = error.max(ending.delay(at));
            end = end.max((ending.at - at) as f64 / 1e6);
        }
        last_errors.push(error);
        last_ends.push(end);
    }
    println!("{}", summary("from kill to the last error", &last_errors));
    println!("{}", summary("from kill to the last end", &last_ends));
    assert!(last_errors.iter().all(|delay| *delay < 5000.0));
}
