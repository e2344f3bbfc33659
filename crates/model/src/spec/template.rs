//! Templates for device names: `mlx5_{gpu//2}:1`.
//!
//! Integer arithmetic over a few named numbers; no calls, no strings inside the braces.
//!
//! *Invariant:* a template that was read uses only known variables. Filling it in fails only for a
//! division by zero, a number out of range, or an unknown NUMA node.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::text_form;

/// Longest template, and deepest nesting, that is read.
const LENGTH_LIMIT: usize = 256;
const DEPTH_LIMIT: u32 = 32;

/// A text with expressions in braces.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Text(String),
    Number(Expression),
}

#[derive(Clone, Debug, PartialEq)]
enum Expression {
    Number(i64),
    Variable(Variable),
    Binary(Box<Expression>, Operator, Box<Expression>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variable {
    Gpu,
    Rank,
    Numa,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
}

/// The numbers that a template may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variables {
    /// The GPU's index.
    pub gpu: u32,
    /// The worker's rank.
    pub rank: u32,
    /// The GPU's NUMA node; `None` when it has none.
    pub numa: Option<u32>,
}

/// Why a text is not a template, or cannot be filled in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message says what each field is")]
#[non_exhaustive]
pub enum TemplateError {
    /// It does not follow the grammar.
    #[error("template {text:?}, column {column}: expected {expected}")]
    Syntax {
        text: String,
        /// Where, from 1.
        column: usize,
        /// What was expected there.
        expected: &'static str,
    },
    /// It is too long or too deeply nested.
    #[error("template of {length} characters is too long or too deeply nested")]
    TooLarge { length: usize },
    /// It cannot be filled in for these numbers.
    #[error("template {text:?}: {problem}")]
    Arithmetic {
        text: String,
        /// What went wrong.
        problem: &'static str,
    },
}

impl Template {
    /// The text with every expression replaced by its number.
    ///
    /// # Errors
    /// If a division is by zero, a number is negative or too large, or `numa` is unknown.
    pub fn fill(&self, variables: Variables) -> Result<String, TemplateError> {
        let mut filled = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => filled.push_str(text),
                Piece::Number(expression) => {
                    let number = expression.value(variables).and_then(|n| {
                        u32::try_from(n).map_err(|_| "the number is negative or too large")
                    });
                    let number = number.map_err(|problem| TemplateError::Arithmetic {
                        text: self.text.clone(),
                        problem,
                    })?;
                    filled.push_str(&number.to_string());
                }
            }
        }
        Ok(filled)
    }
}

impl Expression {
    fn value(&self, variables: Variables) -> Result<i64, &'static str> {
        match self {
            Expression::Number(number) => Ok(*number),
            Expression::Variable(Variable::Gpu) => Ok(i64::from(variables.gpu)),
            Expression::Variable(Variable::Rank) => Ok(i64::from(variables.rank)),
            Expression::Variable(Variable::Numa) => {
                variables.numa.map(i64::from).ok_or("the GPU's NUMA node is unknown")
            }
            Expression::Binary(left, operator, right) => {
                let (a, b) = (left.value(variables)?, right.value(variables)?);
                let result = match operator {
                    Operator::Add => a.checked_add(b),
                    Operator::Subtract => a.checked_sub(b),
                    Operator::Multiply => a.checked_mul(b),
                    Operator::Divide if b == 0 => return Err("division by zero"),
                    Operator::Remainder if b == 0 => return Err("division by zero"),
                    // Floor division and its remainder, as Python has them.
                    Operator::Divide => a.checked_div_euclid(b),
                    Operator::Remainder => a.checked_rem_euclid(b),
                };
                result.ok_or("the number is too large")
            }
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Template {
    type Err = TemplateError;

    fn from_str(text: &str) -> Result<Self, TemplateError> {
        if text.len() > LENGTH_LIMIT {
            return Err(TemplateError::TooLarge { length: text.len() });
        }
        let mut parser = Parser { text, at: 0, depth: 0 };
        let mut pieces = Vec::new();
        while let Some(next) = parser.peek() {
            if next == '{' {
                parser.take(next);
                pieces.push(Piece::Number(parser.sum()?));
                parser.expect('}', "an operator (+ - * // %) or '}'")?;
            } else {
                pieces.push(Piece::Text(parser.literal()?));
            }
        }
        Ok(Self { text: text.to_owned(), pieces })
    }
}

text_form!(Template);

/// Recursive descent over `sum := product (('+'|'-') product)*`,
/// `product := atom (('*'|'//'|'/'|'%') atom)*`, `atom := number | variable | '(' sum ')'`.
struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: u32,
}

impl Parser<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, next: char) {
        self.at += next.len_utf8();
    }

    fn skip_blanks(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn error(&self, expected: &'static str) -> TemplateError {
        let column = self.text[..self.at].chars().count() + 1;
        TemplateError::Syntax { text: self.text.to_owned(), column, expected }
    }

    fn expect(&mut self, wanted: char, expected: &'static str) -> Result<(), TemplateError> {
        self.skip_blanks();
        if self.peek() != Some(wanted) {
            return Err(self.error(expected));
        }
        self.take(wanted);
        Ok(())
    }

    fn literal(&mut self) -> Result<String, TemplateError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | ',');
        let end = self.rest().find(|c| !plain(c)).unwrap_or(self.rest().len());
        if end == 0 {
            return Err(self.error("a letter, digit, '_', '-', '.', ':', ',' or '{'"));
        }
        let literal = self.rest()[..end].to_owned();
        self.at += end;
        Ok(literal)
    }

    fn sum(&mut self) -> Result<Expression, TemplateError> {
        self.chain(Self::product, &[("+", Operator::Add), ("-", Operator::Subtract)])
    }

    fn product(&mut self) -> Result<Expression, TemplateError> {
        const OPERATORS: [(&str, Operator); 4] = [
            ("//", Operator::Divide),
            ("/", Operator::Divide),
            ("*", Operator::Multiply),
            ("%", Operator::Remainder),
        ];
        self.chain(Self::atom, &OPERATORS)
    }

    fn chain(
        &mut self,
        part: fn(&mut Self) -> Result<Expression, TemplateError>,
        operators: &[(&str, Operator)],
    ) -> Result<Expression, TemplateError> {
        let mut left = part(self)?;
        loop {
            self.skip_blanks();
            let found = operators.iter().find(|(sign, _)| self.rest().starts_with(sign));
            let Some((sign, operator)) = found else { return Ok(left) };
            self.at += sign.len();
            left = Expression::Binary(Box::new(left), *operator, Box::new(part(self)?));
        }
    }

    fn atom(&mut self) -> Result<Expression, TemplateError> {
        const ATOM: &str = "a number, 'gpu', 'rank', 'numa' or '('";
        self.skip_blanks();
        if self.peek() == Some('(') {
            self.depth += 1;
            if self.depth > DEPTH_LIMIT {
                return Err(TemplateError::TooLarge { length: self.text.len() });
            }
            self.take('(');
            let inner = self.sum()?;
            self.expect(')', "an operator or ')'")?;
            self.depth -= 1;
            return Ok(inner);
        }
        let end = self.rest().find(|c: char| !c.is_ascii_alphanumeric());
        let word = &self.rest()[..end.unwrap_or(self.rest().len())];
        let expression = match word {
            "gpu" => Expression::Variable(Variable::Gpu),
            "rank" => Expression::Variable(Variable::Rank),
            "numa" => Expression::Variable(Variable::Numa),
            number => {
                let value = number.parse::<u32>().map_err(|_| self.error(ATOM))?;
                Expression::Number(i64::from(value))
            }
        };
        self.at += word.len();
        Ok(expression)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fill(text: &str, gpu: u32) -> Result<String, TemplateError> {
        text.parse::<Template>()?.fill(Variables { gpu, rank: gpu, numa: Some(1) })
    }

    #[test]
    fn two_gpus_share_the_nic_of_their_switch() {
        let ports: Vec<_> = (0..4).map(|gpu| fill("mlx5_{gpu//2}:1", gpu)).collect();
        let expected = ["mlx5_0:1", "mlx5_0:1", "mlx5_1:1", "mlx5_1:1"];
        assert_eq!(ports, expected.map(|port| Ok(port.to_owned())));
    }

    #[test]
    fn operators_bind_as_in_arithmetic() {
        assert_eq!(fill("a{1+2*3}", 0), Ok("a7".to_owned()));
        assert_eq!(fill("a{(1+2)*3 - gpu % 2}", 5), Ok("a8".to_owned()));
        assert_eq!(fill("a{10-3-2}b{numa}", 0), Ok("a5b1".to_owned()));
    }

    #[test]
    fn damaged_templates_say_where() {
        for (text, column) in
            [("mlx5_{gpu//2:1", 13), ("mlx5_{}", 7), ("mlx5_{cpu}", 7), ("m{1+}", 5), ("m}", 2)]
        {
            match text.parse::<Template>() {
                Err(TemplateError::Syntax { column: at, .. }) => assert_eq!(at, column, "{text}"),
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!(fill("m{gpu//0}", 1).is_err());
        assert!(fill("m{gpu-2}", 1).is_err());
        assert!(
            format!("m{{{}1{}}}", "(".repeat(100), ")".repeat(100)).parse::<Template>().is_err()
        );
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[a-z0-9{}()+*/% _:-]{0,60}", gpu in 0u32..64) {
            let _ = fill(&text, gpu);
        }
    }
}
