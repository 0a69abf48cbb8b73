//! Text of messages: sanitizing what other processes have sent, and naming ranks.

/// Returns at most `limit` characters, with control characters replaced by blanks, so that none controls a terminal.
pub(super) fn sanitize(text: &str, limit: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(limit).collect()
}

/// Formats ranks: `rank 2`, `ranks 2, 3 and 5`.
pub(super) fn name_ranks(ranks: &[usize]) -> String {
    const MOST: usize = 16;
    let mut names: Vec<String> = ranks.iter().take(MOST).map(usize::to_string).collect();
    if ranks.len() > MOST {
        names.push(format!("{} more", ranks.len() - MOST));
    }
    match names.split_last() {
        Some((last, [])) => format!("rank {last}"),
        Some((last, rest)) => format!("ranks {} and {last}", rest.join(", ")),
        None => "no rank".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_as_people_would() {
        assert_eq!(name_ranks(&[2]), "rank 2");
        assert_eq!(name_ranks(&[2, 3]), "ranks 2 and 3");
        assert_eq!(name_ranks(&[2, 3, 5]), "ranks 2, 3 and 5");
        let many: Vec<usize> = (1..100).collect();
        assert!(name_ranks(&many).ends_with(", 15, 16 and 83 more"));
    }
}
