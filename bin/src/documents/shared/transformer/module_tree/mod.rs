//! Module trees, printed as PyTorch's `print(model)` does.

mod transformer;

use std::fmt::{self, Display};

pub use transformer::{transformer, tutorial_transformer};

/// A module and its submodules; displayed as PyTorch's `print(model)` does.
///
/// ```
/// use bin::documents::shared::transformer::module_tree::ModuleTree;
///
/// let block = ModuleTree::leaf("Linear(in_features=2, out_features=2, bias=True)");
/// let model = ModuleTree::list([block.clone(), block]);
/// let printed = "ModuleList(\n  (0-1): 2 x Linear(in_features=2, out_features=2, bias=True)\n)";
/// assert_eq!(model.to_string(), printed);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleTree {
    text: String,
    children: Vec<(String, ModuleTree)>,
}

impl ModuleTree {
    /// Returns a module without submodules, with its printed text.
    pub fn leaf(text: impl Into<String>) -> Self {
        Self { text: text.into(), children: Vec::new() }
    }

    /// Returns a module with named submodules.
    pub fn new<'a>(kind: &str, children: impl IntoIterator<Item = (&'a str, ModuleTree)>) -> Self {
        let children = children.into_iter().map(|(name, child)| (name.to_string(), child)).collect();
        Self { text: kind.to_string(), children }
    }

    /// Returns a `ModuleList`: consecutive equal items are printed once.
    pub fn list(items: impl IntoIterator<Item = ModuleTree>) -> Self {
        let mut groups: Vec<(usize, usize, ModuleTree)> = Vec::new();
        for (place, item) in items.into_iter().enumerate() {
            match groups.last_mut() {
                Some((_, last, known)) if *known == item => *last = place,
                _ => groups.push((place, place, item)),
            }
        }
        let child = |(first, last, item): (usize, usize, ModuleTree)| match last - first {
            0 => (first.to_string(), item),
            more => {
                let text = format!("{} x {}", more + 1, item.text);
                (format!("{first}-{last}"), ModuleTree { text, ..item })
            }
        };
        Self { text: "ModuleList".into(), children: groups.into_iter().map(child).collect() }
    }

    /// Returns an `nn.Linear`.
    pub fn linear(inputs: usize, outputs: usize) -> Self {
        Self::leaf(format!("Linear(in_features={inputs}, out_features={outputs}, bias=True)"))
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, depth: usize) -> fmt::Result {
        // A leaf's text includes its parentheses, unless it has no arguments.
        if self.children.is_empty() {
            let brackets = if self.text.ends_with(')') { "" } else { "()" };
            return write!(f, "{}{brackets}", self.text);
        }
        writeln!(f, "{}(", self.text)?;
        for (name, child) in &self.children {
            write!(f, "{:indent$}({name}): ", "", indent = 2 * depth + 2)?;
            child.write(f, depth + 1)?;
            writeln!(f)?;
        }
        write!(f, "{:indent$})", "", indent = 2 * depth)
    }
}

impl Display for ModuleTree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, 0)
    }
}
