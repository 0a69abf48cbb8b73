//! Random rounds: a fault in a random rank at a random time during random calls, in a group of random size, of all
//! ranks or some of them. All other ranks must report the fault and name the rank.

use std::sync::Mutex;
use std::time::Duration;

use rustix::process::Signal;

use crate::dice::{Dice, collectives_among};
use crate::ending::{Ending, summary};
use crate::group::{Group, Setup, in_parallel};
use crate::worker::now;

/// Variable with the number of rounds; [`FEW`] by default.
const ROUNDS: &str = "GIRANDOLE_FAULT_ROUNDS";
/// Variable with the seed, to repeat rounds that have failed.
const SEED: &str = "GIRANDOLE_FAULT_SEED";
const FEW: u64 = 6;

/// The ranks of a round.
struct Team {
    world_size: usize,
    /// The ranks that make calls, in the order of their ranks in the group.
    members: Vec<usize>,
    /// The member with the fault.
    victim: usize,
}

impl Team {
    fn random(dice: &mut Dice) -> Self {
        let world_size = 2 + dice.below(4) as usize;
        let mut members: Vec<usize> = (0..world_size).collect();
        if world_size > 2 && dice.below(3) == 0 {
            // In a rotated order.
            members.rotate_left(dice.below(world_size as u64) as usize);
            members.truncate(2 + dice.below(world_size as u64 - 2) as usize);
        }
        let victim = members[dice.below(members.len() as u64) as usize];
        Self { world_size, members, victim }
    }

    fn is_world(&self) -> bool {
        self.members.len() == self.world_size
    }

    /// Starts the group: members run these scripts, all other ranks wait.
    fn start(&self, setup: &Setup, script: impl Fn(usize) -> String) -> Group {
        let enter = match self.is_world() {
            true => String::new(),
            false => {
                format!("group {}; ", self.members.iter().map(|r| r.to_string() + " ").collect::<String>())
            }
        };
        let script = |rank| match self.members.contains(&rank) {
            true => enter.clone() + &script(rank),
            false => enter.clone() + "ready; await; close",
        };
        Group::start(&(0..self.world_size).map(script).collect::<Vec<_>>(), setup)
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        self.members.iter().copied().filter(|rank| *rank != self.victim)
    }

    /// Waits for all members except the victim.
    fn finish_others(&self, group: &mut Group) -> Vec<Ending> {
        self.others().map(|rank| group.finish(rank)).collect()
    }

    /// Ends the ranks that are not members, and asserts that they succeed and nothing is left.
    fn finish(&self, mut group: Group) {
        let outsiders: Vec<usize> = group.all().filter(|rank| !self.members.contains(rank)).collect();
        group.tell_all(outsiders);
        group.assert_all_done();
    }

    /// Asserts that the error has this kind, and names the victim, the operation and the group.
    fn assert_blames(&self, ending: &Ending, kind: &str, operation: &str) {
        ending.assert_blames(kind, self.victim, operation);
        let text = &ending.failure.as_ref().unwrap().text;
        assert!(text.contains(" #"), "which one? {text}");
        let members: Vec<String> = self.members.iter().map(usize::to_string).collect();
        let place = format!(" in the group [{}]", members.join(", "));
        assert_eq!(text.contains(&place), !self.is_world(), "{text}");
    }
}

/// Runs rounds on each transport; each round returns the milliseconds from the fault to the last error.
fn rounds(what: &str, at_once: usize, round: impl Fn(&mut Dice, Setup) -> f64 + Sync) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let (count, seed) = (number(ROUNDS).unwrap_or(FEW), number(SEED).unwrap_or_else(now));
    for transport in crate::TRANSPORTS {
        println!("{transport}: {SEED}={seed}");
        let delays = Mutex::new(Vec::new());
        in_parallel(at_once, &(0..count).collect::<Vec<_>>(), |index| {
            let mut dice = Dice(seed.wrapping_add(*index));
            let delay = round(&mut dice, Setup { transport, ..Setup::default() });
            delays.lock().unwrap().push(delay);
        });
        println!(
            "{}",
            summary(
                &format!("{what}, {transport}: from the fault to the last error"),
                &delays.into_inner().unwrap()
            )
        );
    }
}

fn longest(endings: &[Ending], since: u64) -> f64 {
    endings.iter().map(|ending| ending.delay(since)).fold(0.0, f64::max)
}

/// Sleeps for a random time, so that the fault happens at a random point.
fn a_moment(dice: &mut Dice) {
    std::thread::sleep(Duration::from_micros(dice.below(20_000)));
}

#[test]
fn killed() {
    rounds("killed", 1, |dice, setup| {
        let (team, seed) = (Team::random(dice), dice.below(1 << 40));
        let mut group = team.start(&setup, |_| format!("random {seed}"));
        group.ready(group.all());
        a_moment(dice);
        let at = group.signal(team.victim, Signal::KILL);
        let endings = team.finish_others(&mut group);
        endings.iter().for_each(|ending| team.assert_blames(ending, "PeerDied", "died during "));
        assert_eq!(group.finish(team.victim).signal, Some(9));
        team.finish(group);
        let delay = longest(&endings, at);
        assert!(delay < 5000.0, "{delay} ms, {endings:#?}");
        assert!(endings.iter().all(|ending| ending.at - at < 10_000_000_000), "{endings:#?}");
        delay
    });
}

#[test]
fn stopped() {
    rounds("stopped, time-out 1.5 s", 4, |dice, setup| {
        let (team, seed) = (Team::random(dice), dice.below(1 << 40));
        let setup = Setup { timeout: Duration::from_millis(1500), ..setup };
        let mut group = team.start(&setup, |_| format!("random {seed}"));
        group.ready(group.all());
        a_moment(dice);
        let at = group.signal(team.victim, Signal::STOP);
        let endings = team.finish_others(&mut group);
        for ending in &endings {
            team.assert_blames(ending, "Timeout", "did not take part in ");
            assert!(ending.failure.as_ref().unwrap().text.contains("does not answer"), "{ending:#?}");
        }
        group.signal(team.victim, Signal::CONT);
        let ending = group.finish(team.victim);
        assert!(ending.failure.is_some(), "it goes on in a group that has failed: {ending:#?}");
        team.finish(group);
        let delay = longest(&endings, at);
        assert!(delay < 8000.0, "{delay} ms, {endings:#?}");
        delay
    });
}

#[test]
fn slow() {
    rounds("slow", 4, |dice, setup| {
        let (team, seed) = (Team::random(dice), dice.below(1 << 40));
        let setup = Setup { slow_warning: Duration::from_secs(1), ..setup };
        let mut group = team.start(&setup, |_| format!("polite {seed}"));
        group.ready(group.all());
        a_moment(dice);
        group.signal(team.victim, Signal::STOP);
        std::thread::sleep(Duration::from_millis(3500));
        group.signal(team.victim, Signal::CONT);
        group.tell_all(team.members.iter().copied());
        let warning = format!(": waiting for rank {} (host ", team.victim);
        for ending in team.finish_others(&mut group) {
            ending.assert_done();
            assert!(ending.stderr.lines().any(|line| line.contains(&warning)), "{} {ending:#?}", team.victim);
        }
        group.finish(team.victim).assert_done();
        team.finish(group);
        0.0
    });
}

#[test]
fn mismatched() {
    rounds("mismatched", 2, |dice, setup| {
        let (team, seed, count) = (Team::random(dice), dice.below(1 << 40), dice.below(6) as usize);
        let (size, leads) = (team.members.len(), format!("some {seed} {count}"));
        let usual = dice.collective(size);
        let other = std::iter::repeat_with(|| dice.collective(size)).find(|call| *call != usual).unwrap();
        let (usual_script, other_script) = match dice.below(4) {
            // It leaves one call out.
            0 => (format!("{leads}; all_reduce f32 7 sum; barrier"), format!("{leads}; barrier; barrier")),
            _ => (
                format!("{leads}; {}; barrier", usual.join(" ")),
                format!("{leads}; {}; barrier", other.join(" ")),
            ),
        };
        let script = |rank| if rank == team.victim { other_script.clone() } else { usual_script.clone() };
        let mut group = team.start(&setup, script);
        let mut endings = team.finish_others(&mut group);
        endings.push(group.finish(team.victim));
        // With two ranks there is no odd one: the higher is named first.
        let odd = if size == 2 { team.members[1] } else { team.victim };
        let number = collectives_among(seed, count, size) + 1;
        let text = endings[0].assert_failed("Mismatch", odd);
        for ending in &endings {
            assert_eq!(ending.assert_failed("Mismatch", odd), text, "{usual_script} | {other_script}");
        }
        assert_eq!(text.matches(&format!(" #{number}")).count(), 2, "{text}");
        assert_eq!(text.contains(" in the group ["), !team.is_world(), "{text}");
        team.finish(group);
        0.0
    });
}

#[test]
fn left_early() {
    rounds("left early", 2, |dice, setup| {
        let (team, seed, count) = (Team::random(dice), dice.below(1 << 40), dice.below(6) as usize);
        let call = dice.call(team.members.len()).join(" ");
        let mut group = team.start(&setup, |rank| match rank == team.victim {
            true => format!("some {seed} {count}; close"),
            false => format!("some {seed} {count}; {call}; barrier"),
        });
        let endings = team.finish_others(&mut group);
        endings.iter().for_each(|ending| team.assert_blames(ending, "PeerLeft", "left the group before "));
        group.finish(team.victim).assert_done();
        team.finish(group);
        0.0
    });
}
