"""Small documents of each format, written by the tests."""

import zipfile

import matplotlib

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def write(path, text):
    path.write_bytes(text.encode())
    return path


def write_pdf(path, pages, title="", sizes=()):
    """A PDF with a page for each text; `sizes` are those of the letters of each page, 10 if not given."""
    import matplotlib.pyplot as plt
    from matplotlib.backends.backend_pdf import PdfPages

    with matplotlib.rc_context({"pdf.fonttype": 42}), PdfPages(path, metadata={"Title": title}) as file:
        for text in pages:
            figure = plt.figure()
            figure.text(0.1, 0.5, text, size=10)
            for number, (size, words) in enumerate(sizes):
                figure.text(0.1, 0.9 - 0.1 * number, words, size=size)
            file.savefig(figure)
            plt.close(figure)
    return path


def write_docx(path, paragraphs, title="", extra=()):
    """A Word file of (style, text) paragraphs; the title is a property; `extra` are further parts by name."""
    names = sorted({style for style, _ in paragraphs if style})
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{name.replace(" ", "")}"><w:name w:val="{name}"/></w:style>'
        for name in names
    )
    body = "".join(
        f'<w:p><w:pPr><w:pStyle w:val="{style.replace(" ", "")}"/></w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>'
        for style, text in paragraphs
    )
    types = f'<Types xmlns="{PACKAGE}/content-types"><Default Extension="rels" ContentType="application/xml"/>'
    types += '<Default Extension="xml" ContentType="application/xml"/></Types>'
    relation = f'<Relationships xmlns="{PACKAGE}/relationships"><Relationship Id="r1" '
    core = f'<p xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{title}</dc:title></p>'
    parts = {
        "[Content_Types].xml": types,
        "_rels/.rels": f'{relation}Type="{RELATIONS}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": f'<w:styles xmlns:w="{WORD}">{styles}</w:styles>',
        "word/_rels/document.xml.rels": f'{relation}Type="{RELATIONS}/styles" Target="styles.xml"/></Relationships>',
        "docProps/core.xml": core,
        **dict(extra),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def write_pptx(path, slides, title=""):
    """A PowerPoint file of (title, text, notes) slides, the first with a table and a picture without description."""
    import io

    import matplotlib.pyplot as plt
    import pptx

    presentation = pptx.Presentation()
    presentation.core_properties.title = title
    for number, (heading, text, notes) in enumerate(slides):
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text = heading
        slide.placeholders[1].text = text
        if notes:
            slide.notes_slide.notes_text_frame.text = notes
        if number == 0:
            table = slide.shapes.add_table(1, 2, 0, 0, 100, 100).table
            table.cell(0, 0).text = "left | cell"
            table.cell(0, 1).text = "right"
            picture = io.BytesIO()
            plt.imsave(picture, [[0.0]], format="png")
            slide.shapes.add_picture(picture, 0, 0)._element.xpath(".//p:cNvPr")[0].set("descr", "")
    presentation.save(str(path))
    return path


def write_epub(path, chapters, title="", language="en"):
    """An EPUB of pages, which stand in the archive in the reverse order."""
    container = '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    container += '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    items = "".join(f'<item id="c{number}" href="c%20{number}.xhtml"/>' for number in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{number}"/>' for number in range(len(chapters)))
    package = '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
    package += f"<dc:title>{title}</dc:title><dc:language>{language}</dc:language></metadata>"
    package += f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    with zipfile.ZipFile(path, "w") as archive:
        for number, chapter in reversed(list(enumerate(chapters))):
            archive.writestr(f"OEBPS/c {number}.xhtml", f"<html><title>page</title><body>{chapter}</body></html>")
        archive.writestr("META-INF/container.xml", container)
        archive.writestr("OEBPS/book.opf", package)
    return path
