//! Slurm's compact notation for many hosts: `n[0-1,5],m03`.

/// More hosts than any cluster has.
const MAX_HOSTS: usize = 1 << 16;
/// Longest host name (RFC 1035), and longest piece of a name in the notation.
const MAX_NAME_LEN: usize = 255;

/// Expands a list into its hosts, in order. The error says what is wrong with it.
pub(super) fn expand(list: &str) -> Result<Vec<String>, &'static str> {
    let mut hosts = Vec::new();
    for part in split(list)? {
        let expanded = expand_one(part)?;
        if hosts.len() + expanded.len() > MAX_HOSTS {
            return Err("give at most 65536 hosts");
        }
        hosts.extend(expanded);
    }
    Ok(hosts)
}

/// Splits a list at the commas outside brackets.
fn split(list: &str) -> Result<Vec<&str>, &'static str> {
    let mut parts = Vec::new();
    let (mut begin, mut inside) = (0, false);
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'[' if inside => return Err("its brackets do not match"),
            b']' if !inside => return Err("its brackets do not match"),
            b'[' | b']' => inside = byte == b'[',
            b',' if !inside => {
                parts.push(&list[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[begin..]);
    match inside {
        true => Err("its brackets do not match"),
        false => Ok(parts),
    }
}

/// Expands one entry, such as `rack[1-2]n[01-03]`: each pair of brackets multiplies the names. Their number and length
/// are checked before any name is built.
fn expand_one(part: &str) -> Result<Vec<String>, &'static str> {
    const LONG: &str = "give names of at most 255 characters";
    if part.split(['[', ']', ',']).any(|text| text.len() > MAX_NAME_LEN) {
        return Err(LONG);
    }
    let (mut pieces, mut rest) = (Vec::new(), part);
    let (mut count, mut length) = (1, 0);
    while let Some((before, more)) = rest.split_once('[') {
        let (numbers, after) = more.split_once(']').ok_or("its brackets do not match")?;
        let numbers = ranges(numbers)?;
        count *= numbers.len();
        if count > MAX_HOSTS {
            return Err("give at most 65536 hosts");
        }
        length += before.len() + numbers.iter().map(String::len).max().unwrap_or(0);
        if length > MAX_NAME_LEN {
            return Err(LONG);
        }
        pieces.push((before, numbers));
        rest = after;
    }
    if part.is_empty() {
        return Err("a host in it has no name");
    }
    if length + rest.len() > MAX_NAME_LEN {
        return Err(LONG);
    }
    Ok((0..count).map(|index| name(&pieces, rest, index, count)).collect())
}

/// Returns the `index`-th of `count` names; the last number varies fastest.
fn name(pieces: &[(&str, Vec<String>)], end: &str, mut index: usize, mut count: usize) -> String {
    let mut name = String::new();
    for (before, numbers) in pieces {
        count /= numbers.len();
        name += before;
        name += &numbers[index / count];
        index %= count;
    }
    name + end
}

/// Expands the text in brackets, such as `0-1,5`, with leading zeros kept.
fn ranges(text: &str) -> Result<Vec<String>, &'static str> {
    let wrong = "give numbers and ranges of numbers in brackets, such as n[0-3,7]";
    let number = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
        true => digits.parse::<usize>().map_err(|_| wrong),
        false => Err(wrong),
    };
    let mut all = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (number(first)?, number(last)?);
        if low > high || high - low >= MAX_HOSTS || all.len() > MAX_HOSTS {
            return Err(wrong);
        }
        let width = first.len();
        all.extend((low..=high).map(|number| format!("{number:0width$}")));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn as_slurm_expands_it() {
        for (list, hosts) in [
            ("n0", "n0"),
            ("n[0-1,5],m03", "n0 n1 n5 m03"),
            ("a,b,c", "a b c"),
            ("n[08-11]", "n08 n09 n10 n11"),
            ("n[9-11]", "n9 n10 n11"),
            ("r[1-2]n[01-02]x,z", "r1n01x r1n02x r2n01x r2n02x z"),
            ("host-7.example.org,10.0.0.1", "host-7.example.org 10.0.0.1"),
        ] {
            assert_eq!(expand(list).unwrap().join(" "), hosts, "{list}");
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for wrong in [
            "", "n[", "n]", "n[1", "n[a]", "n[]", "n[2-1]", "n[1-]", "n[-1]", "a,,b", "n[[1]]",
            "n[0-99999999]", "n[1-2-3]",
        ] {
            assert!(expand(wrong).is_err(), "{wrong}: {:?}", expand(wrong));
        }
        let zeros = "0".repeat(70_000);
        for many in [
            "[0-9]".repeat(30),
            "[1]".repeat(40_000),
            "[1-2]n".repeat(24),
            "n[1-2]".repeat(64),
            format!("n[{zeros}1]"),
            "n".repeat(256),
            "n".repeat(255) + "[1]",
            "[1]".to_string() + &"n".repeat(255),
        ] {
            assert!(expand(&many).is_err());
        }
        assert_eq!(expand(&"[1]".repeat(255)), Ok(vec!["1".repeat(255)]));
        assert_eq!(expand(&"[1-2]".repeat(16)).map(|hosts| hosts.len()), Ok(MAX_HOSTS));
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(list in "[n0-9,\\[\\]-]{0,24}") {
            let _ = expand(&list);
        }

        #[test]
        fn a_range_has_all_its_numbers(low in 0_usize..50, more in 0_usize..50) {
            let hosts = expand(&format!("n[{low}-{}]", low + more)).unwrap();
            prop_assert_eq!(hosts, (low..=low + more).map(|n| format!("n{n}")).collect::<Vec<_>>());
        }
    }
}
