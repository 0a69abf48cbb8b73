//! Fuzz target: arbitrary environment variables.

use super::{LaunchedRank, Variables, detect, node_list};

/// Reads rank and meeting point from an environment given as lines of `NAME=VALUE`.
pub fn fuzz_environment(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let variables: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let lookup =
        |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into());
    for (_, value) in &variables {
        if let Ok(hosts) = node_list::expand(value) {
            assert!(
                hosts.iter().all(|host| !host.is_empty() && !host.contains(['[', ']', ','])),
                "{hosts:?}"
            );
        }
    }
    let env = Variables(&lookup);
    if let Ok(Some(found)) = detect(&env) {
        assert!(found.place.rank < found.place.world_size);
        let _ = found.master(&env);
    }
    if let Err(error) = LaunchedRank::from_lookup(&lookup) {
        assert!(!error.to_string().is_empty());
    }
}
