//! Sentences that have to be read twice.

use crate::pages::{all, page};

/// Each with what says it at once.
const RIDDLES: [(&str, &str); 13] = [
    ("times are yours", "timings vary by machine"),
    ("what is missing is one line", "a missing library is reported in one line"),
    ("cannot be gone on from", "unusable"),
    ("can be gone on from", "usable"),
    ("is no mistake of", "is not an error"),
    ("is all there is to", "is all that you need"),
    ("nothing has to be said", "no options are needed"),
    ("there are not, and why", "impossible ways, with the reason"),
    ("as they are called", "the usual ones"),
    ("works so,", "works this way"),
    ("without a word", "silently"),
    ("underscores do as well", "underscores may be used as well"),
    ("but for the order", "except for the order"),
];

#[test]
fn there_are_no_riddles() {
    for page in all().into_iter().chain([page("CHANGELOG.md")]) {
        let text = page.text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
        for (riddle, plain) in RIDDLES {
            assert!(!text.contains(riddle), "{}: in place of `{riddle}`, say `{plain}`", page.name());
        }
    }
}
