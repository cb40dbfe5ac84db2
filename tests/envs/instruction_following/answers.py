"""Three answers to each prompt of IFEval, written by a program: the first is to follow the instructions, the second and
the third miss some by one, or have what is easily counted wrong: abbreviations, contractions, blank lines, asterisks.
"""

import json
import random

ENGLISH = [
    "Dr. Smith lives in the U.S. and works for NASA.", "We don't know why, but it rained at 5 p.m. yesterday.",
    "The price rose by 3.5% (from $2.10), didn't it?", "Hello there!", "See https://example.org/a?b=c for more...",
    "A cat sat on the mat; the dog slept.", "It's well-known: e.g. apples, pears, etc. are fruit.",
    "Mr. O'Neil said \"Go on!\" and left.", "Is this the end?", "No. 5 is the best of them all.",
    "The quick brown fox jumps over the lazy dog.", "She wrote to J. R. R. Tolkien in Oct. 1950.",
    "There are many reasons for that; here is one of them.", "Everybody should try this at least once in their life!",
]  # fmt: skip
SHOUTED = [
    "NASA",
    "DON'T",
    "JOHN'S.",
    "U.S.",
    "AI-BASED",
    "CANNOT",
    "I",
    "OK!",
    "WE'LL",
    "A1",
    "(UN)",
    "GONNA",
    "Ph.D.",
]
LANGUAGES = {
    "hi": "यह एक छोटा सा उदाहरण है। आज मौसम बहुत अच्छा है।",
    "kn": "ಇದು ಒಂದು ಸಣ್ಣ ಉದಾಹರಣೆ. ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ.",
    "mr": "हे एक लहान उदाहरण आहे. आज हवामान खूप चांगले आहे.",
    "vi": "Đây là một ví dụ nhỏ. Hôm nay thời tiết rất đẹp.",
    "ko": "이것은 작은 예입니다. 오늘 날씨가 아주 좋습니다.",
    "sw": "Huu ni mfano mdogo. Leo hali ya hewa ni nzuri sana.",
    "de": "Das ist ein kleines Beispiel. Heute ist das Wetter sehr schön.",
    "pa": "ਇਹ ਇੱਕ ਛੋਟੀ ਜਿਹੀ ਉਦਾਹਰਣ ਹੈ। ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ।",
    "fa": "این یک مثال کوچک است. امروز هوا بسیار خوب است.",
    "ru": "Это небольшой пример. Сегодня очень хорошая погода.",
    "bg": "Това е малък пример. Днес времето е много хубаво.",
    "pt": "Este é um pequeno exemplo. Hoje o tempo está muito bom.",
    "gu": "આ એક નાનું ઉદાહરણ છે. આજે હવામાન ખૂબ સારું છે.",
    "te": "ఇది ఒక చిన్న ఉదాహరణ. ఈ రోజు వాతావరణం చాలా బాగుంది.",
    "it": "Questo è un piccolo esempio. Oggi il tempo è molto bello.",
    "ar": "هذا مثال صغير. الطقس اليوم جميل جدا.",
    "ta": "இது ஒரு சிறிய உதாரணம். இன்று வானிலை மிகவும் நன்றாக உள்ளது.",
    "fi": "Tämä on pieni esimerkki. Tänään sää on oikein hyvä.",
    "ur": "یہ ایک چھوٹی سی مثال ہے۔ آج موسم بہت اچھا ہے۔",
    "th": "นี่คือตัวอย่างเล็ก ๆ วันนี้อากาศดีมาก",
    "ne": "यो एउटा सानो उदाहरण हो। आज मौसम धेरै राम्रो छ।",
    "bn": "এটি একটি ছোট উদাহরণ। আজ আবহাওয়া খুব ভালো।",
}


class Writer:
    """Writes one of the answers to a row."""

    def __init__(self, row, number):
        self.row, self.number = row, number
        self.rng = random.Random(f"{row['key']} {number}")
        self.wants = dict(zip((id.partition(":")[2] for id in row["instruction_id_list"]), row["kwargs"], strict=True))

    def arguments(self, id):
        return self.wants.get(id)

    def off(self):
        """What a number is off by."""
        return 0 if self.number == 0 else self.rng.choice((-1, 0, 0, 1))

    def slips(self):
        return self.number > 0 and self.rng.random() < 0.3

    def count(self, relation, bound):
        return max(0, (bound - 1 if relation == "less than" else bound) + self.off())

    def write(self):
        if self.number == 2 and self.rng.random() < 0.04:
            return self.rng.choice(["", "  \n", "***", "12345 ???", '"', "<<>>"])
        body = self.sentences()
        for id in ("bullets", "highlights", "placeholders", "keywords", "letters", "capitals"):
            body += getattr(self, id)()
        text = self.layout(body)
        if want := self.arguments("number_words"):
            words, count = text.split(" "), self.count(want["relation"], want["num_words"])
            text = " ".join((words * (1 + count // max(1, len(words))))[: max(1, count)] if count else words[:1])
        for id in ("title", "two_responses", "postscript", "json", "constrained", "end", "repeat", "quotes", "case"):
            text = getattr(self, id)(text)
        if "no_comma" in self.wants and not self.slips():
            text = text.replace(",", "")
        if self.number == 2:
            text = self.rng.choice(
                [text, f"Sure! Here it is:\n\n{text}", f"{text}\n\nI hope that helps.", f"**{text}**"]
            )
        return text

    def sentences(self):
        want, language = self.arguments("number_sentences"), (self.arguments("response_language") or {}).get("language")
        count = self.count(want["relation"], want["num_sentences"]) if want else self.rng.randint(2, 7)
        if language and not self.slips():
            return [LANGUAGES.get(language, LANGUAGES["de"])] * max(1, count // 2)
        pool = ENGLISH if self.number else ENGLISH[9:]
        return [self.rng.choice(pool) for _ in range(max(1, count))]

    def bullets(self):
        if not (want := self.arguments("number_bullet_lists")):
            return ["\n\n  * a point\n*\n- another"] if self.number == 2 and self.rng.random() < 0.1 else []
        marks = ["* {}", "- {}"] if self.number == 0 else ["* {}", "  - {}", "*{}", "** {}", "\n * {}", "-{}"]
        points = [self.rng.choice(marks).format(f"point {n}") for n in range(max(0, want["num_bullets"] + self.off()))]
        return ["\n" + "\n".join(points) + "\n"]

    def highlights(self):
        want = self.arguments("number_highlighted_sections")
        marks = ["*{}*"] if self.number == 0 else ["*{}*", "**{}**", "* {} *", "***{}***", "**", "*{}\n*"]
        count = max(0, want["num_highlights"] + self.off()) if want else 0
        return [self.rng.choice(marks).format(f"part {n}") for n in range(count)]

    def placeholders(self):
        want = self.arguments("number_placeholders")
        marks = ["[name]"] if self.number == 0 else ["[name]", "[]", "[[x]]", "[a\nb]", "[a] b]", "[to"]
        return [self.rng.choice(marks) for _ in range(max(0, want["num_placeholders"] + self.off()) if want else 0)]

    def keywords(self):
        parts = []
        for word in (self.arguments("existence") or {}).get("keywords", []):
            parts += [] if self.slips() else [self.rng.choice([word, word.upper(), f"{word}s"])]
        if want := self.arguments("frequency"):
            parts += [want["keyword"]] * self.count(want["relation"], want["frequency"])
        for word in (self.arguments("forbidden_words") or {}).get("forbidden_words", []):
            parts += (
                [self.rng.choice([word, word.capitalize(), f"{word}s", f"a{word}", f"{word}-x"])]
                if self.slips()
                else []
            )
        return [f"{part}." if self.rng.random() < 0.3 else part for part in parts]

    def letters(self):
        if not (want := self.arguments("letter_frequency")):
            return []
        return [self.rng.choice([want["letter"], want["letter"].upper()])] * self.count(
            want["let_relation"], want["let_frequency"]
        )

    def capitals(self):
        if not (want := self.arguments("capital_word_frequency")):
            return [self.rng.choice(SHOUTED)] if self.slips() else []
        words = SHOUTED[:1] if self.number == 0 else SHOUTED
        return [self.rng.choice(words) for _ in range(self.count(want["capital_relation"], want["capital_frequency"]))]

    def layout(self, body):
        if want := self.arguments("multiple_sections"):
            mark, count = want["section_spliter"], max(0, want["num_sections"] + self.off())
            forms = ["\n{} {}\n"] if self.number == 0 else ["\n{} {}\n", "{}{} ", "{}\n{}:", "{}  {}"]
            return " ".join(body) + "".join(f"{self.rng.choice(forms).format(mark, n + 1)}text" for n in range(count))
        if want := self.arguments("number_paragraphs"):
            marks = ["\n***\n"] if self.number == 0 else ["\n***\n", " *** ", "***", "\n\n"]
            return self.paragraphs(body, want["num_paragraphs"], marks, edges=["", "", "***\n"])
        if want := self.arguments("nth_paragraph_first_word"):
            return self.paragraphs(body, want["num_paragraphs"], ["\n\n"], edges=["", "", "\n\n"], want=want)
        return " ".join(body)

    def paragraphs(self, body, count, marks, edges, want=None):
        count = max(1, count + self.off())
        parts = [" ".join(body[n::count]) or "More." for n in range(count)]
        if want and want["nth_paragraph"] <= count and not self.slips():
            word = self.rng.choice([want["first_word"], f'"{want["first_word"].upper()}"', f"'{want['first_word']},"])
            parts[want["nth_paragraph"] - 1] = f"{word} {parts[want['nth_paragraph'] - 1]}"
        if self.slips():
            parts.insert(self.rng.randrange(len(parts) + 1), " ")
        text = parts[0]
        for part in parts[1:]:
            text += self.rng.choice(marks) + part
        return self.rng.choice(edges) + text if self.number else text

    def title(self, text):
        if "title" not in self.wants:
            return text
        titles = (
            ["<<A title>>"]
            if self.number == 0
            else ["<<A title>>", "<A title>", "<< >>", "<<a\nb>>", "<<<<x>>", "<<>>>"]
        )
        return f"{self.rng.choice(titles)}\n{text}"

    def two_responses(self, text):
        if "two_responses" not in self.wants:
            return text
        others = ["Another answer."] if self.number == 0 else ["Another answer.", text, " ", "A.\n******\nB."]
        return f"{text}\n******\n{self.rng.choice(others)}"

    def postscript(self, text):
        if not (want := self.arguments("postscript")):
            return text
        mark = want["postscript_marker"]
        marks = [mark] if self.number == 0 else [mark, mark.lower(), "P. S.", "P.P.S.", "p.p. s", "PS:"]
        return f"{text}\n\n{self.rng.choice(marks)} Thanks."

    def json(self, text):
        if "json_format" not in self.wants:
            return text
        form = json.dumps({"answer": text})
        forms = (
            [f"```json\n{form}\n```"]
            if self.number == 0
            else [form, f"```\n{form}```", f"```JSON\n{form}", form[:-1], "7"]
        )
        return self.rng.choice(forms)

    def constrained(self, text):
        if "constrained_response" not in self.wants:
            return text
        return (
            self.rng.choice(["My answer is yes.", "My answer is no.", "My answer is maybe."])
            if not self.slips()
            else text
        )

    def end(self, text):
        if not (want := self.arguments("end_checker")):
            return text
        phrase = want["end_phrase"]
        phrases = [phrase, phrase.upper(), f"{phrase} Bye.", phrase[:-1]] if self.number else [phrase]
        return f"{text} {self.rng.choice(phrases)}"

    def repeat(self, text):
        if not (want := self.arguments("repeat_prompt")):
            return text
        prompt = want["prompt_to_repeat"]
        prompts = [prompt, prompt.upper(), f"  {prompt}", prompt[1:]] if self.number else [prompt]
        return f"{self.rng.choice(prompts)}\n{text}"

    def quotes(self, text):
        if "quotation" not in self.wants:
            return text
        return f'"{text}"' if not self.slips() else self.rng.choice([f'"{text}', f"“{text}”", f'\n"{text}"\n'])

    def case(self, text):
        if "english_capital" in self.wants:
            return text.upper() if not self.slips() else f"{text.upper()} x"
        if "english_lowercase" in self.wants:
            return text.lower() if not self.slips() else f"{text.lower()} X"
        return text


def answers(row):
    """The three answers to a row."""
    return [Writer(row, number).write() for number in range(3)]
