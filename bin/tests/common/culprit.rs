//! Tests that kill or stop one rank of a run: the other ranks and the launcher must name it.

use rustix::process::{Signal, kill_process};
use sampler::Generator;

use super::{Folder, Girandole, Session, text};

/// Environment variable that overrides the number of rounds.
const ROUNDS: &str = "GIRANDOLE_FAULT_ROUNDS";

/// In each round, kills or stops one of four ranks at a random moment of training: all other ranks must name it, and
/// the launcher must in its last line. `seed` determines the rank and the moment.
pub(crate) fn all_name_the_culprit(command: &Girandole, arguments: &[&str], seed: u64, rounds: usize) {
    let rounds = std::env::var(ROUNDS).map_or(rounds, |rounds| rounds.parse().unwrap());
    let mut generator = Generator::new(seed);
    let mut random = |below: u32| generator.next_u32() % below;
    for round in 0..rounds {
        let (victim, signal) = (random(4) as usize, [Signal::KILL, Signal::STOP][round % 2]);
        let folder = Folder::new();
        let lines = folder.argument("m.jsonl");
        let all = ["--world-size", "4", "--timeout", "3", "--metrics", &lines];
        let long = if arguments.contains(&"--steps") { &[][..] } else { &["--epochs", "1000000"] };
        let mut session = Session::start(command, &[arguments, &all, long].concat());
        session.until("steps", || std::fs::metadata(&lines).is_ok_and(|file| file.len() > 0));
        std::thread::sleep(std::time::Duration::from_micros(random(50_000).into()));
        kill_process(session.ranks()[victim], signal).unwrap();
        let output = session.end();
        let said = text(&output.stderr);
        let what = format!("rank {victim}, {signal:?}:\n{said}");
        assert_eq!(output.status.code(), Some(1), "{what}");
        assert!(said.lines().last().unwrap().starts_with(&format!("error: rank {victim} (")), "{what}");
        for other in (0..4).filter(|other| *other != victim) {
            let own: Vec<&str> =
                said.lines().filter(|line| line.starts_with(&format!("rank {other}: error: "))).collect();
            let named = format!("rank {other}: error: rank {victim} (host ");
            assert!(own.len() == 1 && own[0].starts_with(&named), "rank {other} says {own:?}; {what}");
        }
    }
}
