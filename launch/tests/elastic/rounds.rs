//! Ranks are lost and join at random times.

use std::time::Duration;

use crate::job::Job;

/// Number of rounds, each with different kills. `ELASTIC_ROUNDS` overrides it.
const ROUNDS: u64 = 6;

/// Pseudo-random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn kills_at_random_moments_also_while_the_others_come_together() {
    let rounds = std::env::var("ELASTIC_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let mut dice = Dice(round);
        let mut job = Job::start(5, 60.0);
        let (mut next, kills) = (5, 1 + dice.below(4));
        for _ in 0..kills {
            // Rank 4 is never killed: a rank that has not joined yet could not continue alone.
            let ranks: Vec<usize> = job.ranks.keys().copied().filter(|rank| *rank != 4).collect();
            let lost = ranks[dice.below(ranks.len() as u64) as usize];
            // Some kills follow each other closely, during the recovery from the one before.
            std::thread::sleep(Duration::from_micros(dice.below(4) * dice.below(12_000)));
            job.kill(&[lost]);
            if dice.below(3) == 0 {
                job.newcomer(next);
                next += 1;
            }
        }
        let left: Vec<usize> = job.ranks.keys().copied().collect();
        println!("round {round}: {left:?}");
        job.wait_for_groups(&left);
        job.finish(&left);
    }
}
