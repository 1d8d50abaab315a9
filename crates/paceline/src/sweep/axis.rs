//! `--vary NAME=V1,V2,…`: one name, or several together, that takes one value after the other.
//!
//! ```text
//! dp=1,2,4                                     a flag
//! dimension.0.bandwidth=1x,2x,4x               a field of the cluster
//! dp+global-batch=1+16,2+32                    two that change together
//! dimension.0.shape=flat::[64],cube::[4,4,4]   values with labels
//! ```

use crate::plot::Number;

/// Names that vary together, and their values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    /// Flags (without dashes) and paths into the cluster.
    pub names: Vec<String>,
    /// The values, in the given order.
    pub settings: Vec<Setting>,
}

/// One value of an axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Setting {
    /// Displayed label.
    pub label: String,
    /// One value per name.
    pub values: Vec<String>,
}

impl Axis {
    /// Parses an axis; the error describes the problem.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (names, values) =
            text.split_once('=').ok_or("write NAME=V1,V2,…, for example dp=1,2,4")?;
        let names: Vec<String> = names.split('+').map(|name| name.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err("a name is missing before the =".to_owned());
        }
        if let Some((index, name)) =
            names.iter().enumerate().find(|(index, name)| names[..*index].contains(name))
        {
            return Err(format!("{name} stands there {} times", index + 1));
        }
        let values = split(values);
        let settings: Result<Vec<_>, String> =
            values.into_iter().map(|value| Setting::parse(value, &names)).collect();
        let settings = settings?;
        for (index, setting) in settings.iter().enumerate() {
            if settings[..index].iter().any(|earlier| earlier.values == setting.values) {
                return Err(format!("the value {} stands there twice", setting.values.join("+")));
            }
        }
        Ok(Self { names, settings })
    }

    /// Displayed name of the axis: its first name.
    pub(super) fn title(&self) -> &str {
        &self.names[0]
    }

    /// Its values as numbers of one unit, if all are such.
    pub(super) fn numbers(&self) -> Option<Vec<Number>> {
        let read = |setting: &Setting| Number::read(&setting.values[0]);
        let numbers: Vec<Number> = self.settings.iter().map(read).collect::<Option<_>>()?;
        let named = self.settings.iter().any(|setting| setting.label != setting.values[0]);
        let same_unit = numbers.iter().all(|number| number.unit == numbers[0].unit);
        (same_unit && !named).then_some(numbers)
    }
}

impl Setting {
    fn parse(text: &str, names: &[String]) -> Result<Self, String> {
        let (label, rest) = match text.split_once("::") {
            Some((label, rest)) => (Some(label.trim()), rest),
            None => (None, text),
        };
        // A single name takes the text unchanged, including plus signs.
        let values: Vec<String> = match names {
            [_] => vec![rest.trim().to_owned()],
            _ => rest.split('+').map(|value| value.trim().to_owned()).collect(),
        };
        if values.len() != names.len() {
            let (names, needed) = (names.join("+"), names.len());
            return Err(format!(
                "'{text}' has {} values, but {names} needs {needed}: join them with +",
                values.len()
            ));
        }
        if values.iter().any(String::is_empty) {
            return Err("a value is missing: two commas, or one at the end".to_owned());
        }
        let label = label.unwrap_or(&values[0]).to_owned();
        Ok(Self { label, values })
    }
}

/// Splits at the commas outside brackets.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_i64;
    text.split(|c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        c == ',' && depth <= 0
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(axis: &Axis) -> Vec<String> {
        axis.settings.iter().map(|setting| setting.values.join("+")).collect()
    }

    #[test]
    fn flags_fields_and_lists_are_read() {
        let axis = Axis::parse("dp=1, 2,4").unwrap();
        assert_eq!((axis.title(), values(&axis)), ("dp", vec!["1".into(), "2".into(), "4".into()]));
        let axis = Axis::parse("dimension.0.shape=flat::[64],cube::[4,4,4]").unwrap();
        assert_eq!(values(&axis), ["[64]", "[4,4,4]"]);
        assert_eq!(axis.settings[1].label, "cube");
        let axis = Axis::parse("dp+global-batch=1+16,2+32").unwrap();
        assert_eq!((axis.names.len(), axis.settings[1].values[1].as_str()), (2, "32"));
        assert_eq!(axis.settings[1].label, "2");
        assert_eq!(values(&Axis::parse("algorithm=hierarchical:ring:ring/8").unwrap()).len(), 1);
    }

    #[test]
    fn numbers_of_one_unit_make_a_scale() {
        let scale = |text: &str| {
            let numbers = Axis::parse(text).unwrap().numbers()?;
            Some(numbers.iter().map(|number| number.value).collect::<Vec<_>>())
        };
        assert_eq!(scale("dp=1,2,4"), Some(vec![1.0, 2.0, 4.0]));
        assert_eq!(scale("size=1MiB,1GiB"), Some(vec![1048576.0, 1073741824.0]));
        assert_eq!(scale("dimension.0.bandwidth=1x,2x"), Some(vec![1.0, 2.0]));
        assert_eq!(scale("size=1MiB,2x"), None);
        assert_eq!(scale("algorithm=ring,tree"), None);
        assert_eq!(scale("zero=none::0,all::3"), None, "names make categories");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, said) in [
            ("dp", "write NAME=V1,V2"),
            ("=1", "a name is missing"),
            ("dp+=1+2", "a name is missing"),
            ("dp=1,,2", "a value is missing"),
            ("dp=", "a value is missing"),
            ("dp=1,2,1", "the value 1 stands there twice"),
            ("dp+dp=1+2", "dp stands there 2 times"),
            ("dp+tp=1+2,3", "'3' has 1 values, but dp+tp needs 2"),
        ] {
            let told = Axis::parse(text).unwrap_err();
            assert!(told.contains(said), "{text}: {told}");
        }
    }
}
