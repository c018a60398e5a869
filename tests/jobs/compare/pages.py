"""What a browser would find on the pages that `report` and `show --html` write."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Its tags with attributes, words outside of style, articles' texts, marks with their forwards, and all addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.articles: list[str] = []
        self.marks: list[tuple[str | None, str]] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action"}]
        if tag == "article":
            self.articles.append("")
        if tag == "mark":
            self.marks.append((dict(attrs).get("data-f"), ""))
        if tag not in {"meta", "use", "path", "rect"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if "article" in self.open:
            self.articles[-1] += data
            if self.open[-1] == "mark":
                self.marks[-1] = (self.marks[-1][0], self.marks[-1][1] + data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
